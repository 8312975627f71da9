"""The programming languages: how a file of one is known, its grammar, and what in its syntax is a definition.

A new language is a row here, the wheel of its grammar in pyproject.toml, and a sample in the tests.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from ingest.guess import spoken_in


@dataclass(frozen=True)
class CodeLanguage:
    """Names are separated by blanks; node types are the grammar's own.

    `containers` are definitions that are opened to their members; `groups` have no meaning of their own, so
    that their children stand in their place; a node of `wrappers` is the definition in it, with what stands
    around it; `prelude` belongs to the definition below it, as comments do. With `calls` a definition is a
    call, and its type is the name of what is called.
    """

    name: str
    suffixes: str
    module: str
    function: str = "language"
    containers: str = ""
    definitions: str = ""
    groups: str = ""
    wrappers: str = ""
    prelude: str = ""
    interpreters: str = ""
    file_names: str = ""
    calls: bool = False


_JAVASCRIPT = CodeLanguage(
    "javascript", "js mjs cjs jsx", "tree_sitter_javascript",
    containers="class_declaration class abstract_class_declaration interface_declaration enum_declaration internal_module",
    definitions="function_declaration generator_function_declaration method_definition arrow_function "
    "function_expression type_alias_declaration",
    wrappers="export_statement lexical_declaration variable_declaration variable_declarator expression_statement "
    "ambient_declaration", prelude="decorator function_signature", interpreters="node",
)  # fmt: skip
_C_DEFINITIONS = "function_definition macro_definition preproc_function_def union_specifier type_definition"
_C_GROUPS = "preproc_ifdef preproc_if preproc_else preproc_elif linkage_specification declaration_list"

_ALL = (
    CodeLanguage("python", "py pyi pyw", "tree_sitter_python", containers="class_definition",
                 definitions="function_definition", wrappers="decorated_definition", interpreters="python python2 python3"),
    _JAVASCRIPT,
    replace(_JAVASCRIPT, name="typescript", suffixes="ts mts cts", module="tree_sitter_typescript",
            function="language_typescript", interpreters="deno"),
    replace(_JAVASCRIPT, name="tsx", suffixes="tsx", module="tree_sitter_typescript", function="language_tsx",
            interpreters=""),
    CodeLanguage("java", "java", "tree_sitter_java",
                 containers="class_declaration interface_declaration enum_declaration record_declaration",
                 definitions="method_declaration constructor_declaration annotation_type_declaration",
                 groups="enum_body_declarations"),
    CodeLanguage("go", "go", "tree_sitter_go", definitions="function_declaration method_declaration type_declaration"),
    CodeLanguage("c", "c h", "tree_sitter_c", definitions=f"{_C_DEFINITIONS} struct_specifier enum_specifier",
                 groups=_C_GROUPS, wrappers="declaration"),
    CodeLanguage("cpp", "cc cpp cxx hh hpp hxx ipp cu cuh", "tree_sitter_cpp",
                 containers="class_specifier struct_specifier namespace_definition",
                 definitions=f"{_C_DEFINITIONS} enum_specifier alias_declaration concept_definition",
                 groups=_C_GROUPS, wrappers="declaration template_declaration field_declaration"),
    CodeLanguage("rust", "rs", "tree_sitter_rust", containers="impl_item trait_item mod_item",
                 definitions="function_item struct_item enum_item union_item macro_definition function_signature_item",
                 prelude="attribute_item"),
    CodeLanguage("csharp", "cs csx", "tree_sitter_c_sharp",
                 containers="class_declaration struct_declaration interface_declaration record_declaration namespace_declaration",
                 definitions="method_declaration constructor_declaration property_declaration enum_declaration "
                 "delegate_declaration operator_declaration local_function_statement", wrappers="global_statement"),
    CodeLanguage("ruby", "rb rake gemspec", "tree_sitter_ruby", containers="class module singleton_class",
                 definitions="method singleton_method", groups="body_statement", interpreters="ruby",
                 file_names="rakefile gemfile vagrantfile"),
    CodeLanguage("php", "php phtml", "tree_sitter_php", function="language_php",
                 containers="class_declaration interface_declaration trait_declaration enum_declaration namespace_definition",
                 definitions="function_definition method_declaration", interpreters="php"),
    CodeLanguage("bash", "sh bash zsh ksh", "tree_sitter_bash", definitions="function_definition",
                 interpreters="sh bash zsh ksh dash"),
    CodeLanguage("scala", "scala sc sbt", "tree_sitter_scala",
                 containers="class_definition object_definition trait_definition enum_definition package_object",
                 definitions="function_definition function_declaration given_definition", interpreters="scala"),
    CodeLanguage("kotlin", "kt kts", "tree_sitter_kotlin", containers="class_declaration object_declaration companion_object",
                 definitions="function_declaration secondary_constructor", groups="class_body enum_class_body"),
    CodeLanguage("swift", "swift", "tree_sitter_swift", containers="class_declaration protocol_declaration",
                 definitions="function_declaration init_declaration deinit_declaration subscript_declaration "
                 "protocol_function_declaration typealias_declaration", interpreters="swift"),
    CodeLanguage("lua", "lua", "tree_sitter_lua", definitions="function_declaration function_definition",
                 wrappers="assignment_statement variable_declaration expression_list", interpreters="lua luajit"),
    CodeLanguage("css", "css", "tree_sitter_css", containers="media_statement supports_statement",
                 definitions="rule_set keyframes_statement", groups="block"),
    CodeLanguage("sql", "sql", "tree_sitter_sql", wrappers="statement",
                 definitions="create_table create_function create_view create_materialized_view create_trigger create_type "
                 "create_index create_procedure alter_table"),
    CodeLanguage("haskell", "hs", "tree_sitter_haskell", containers="class instance",
                 definitions="function bind data_type newtype type_synomym type_family",
                 groups="imports declarations class_declarations instance_declarations", prelude="haddock signature pragma",
                 interpreters="runhaskell"),
    CodeLanguage("ocaml", "ml", "tree_sitter_ocaml", function="language_ocaml",
                 containers="module_definition class_definition",
                 groups="module_binding structure class_binding object_expression",
                 definitions="value_definition type_definition method_definition module_type_definition exception_definition",
                 interpreters="ocaml"),
    CodeLanguage("ocaml-interface", "mli", "tree_sitter_ocaml", function="language_ocaml_interface",
                 definitions="value_specification type_definition module_definition module_type_definition exception_definition"),
    CodeLanguage("elixir", "ex exs", "tree_sitter_elixir", containers="defmodule defprotocol defimpl",
                 definitions="def defp defmacro defmacrop defguard defdelegate defstruct test describe", groups="do_block",
                 prelude="unary_operator", interpreters="elixir", calls=True),
    CodeLanguage("julia", "jl", "tree_sitter_julia", containers="module_definition",
                 definitions="function_definition struct_definition macro_definition abstract_definition", interpreters="julia"),
    CodeLanguage("zig", "zig", "tree_sitter_zig", containers="struct_declaration union_declaration",
                 definitions="function_declaration enum_declaration test_declaration", wrappers="variable_declaration"),
    CodeLanguage("hcl", "tf hcl tfvars", "tree_sitter_hcl", definitions="block", groups="body"),
    CodeLanguage("powershell", "ps1 psm1", "tree_sitter_powershell", containers="class_statement",
                 definitions="function_statement class_method_definition enum_statement", groups="statement_list",
                 interpreters="pwsh powershell"),
    CodeLanguage("groovy", "groovy gradle gvy", "tree_sitter_groovy",
                 containers="class_declaration interface_declaration enum_declaration",
                 definitions="method_declaration constructor_declaration function_definition", interpreters="groovy",
                 file_names="jenkinsfile"),
    CodeLanguage("make", "mk mak", "tree_sitter_make", definitions="rule define_directive", groups="conditional",
                 file_names="makefile gnumakefile", interpreters="make"),
    CodeLanguage("objc", "m mm", "tree_sitter_objc",
                 containers="class_interface class_implementation protocol_declaration category_interface "
                 "category_implementation",
                 definitions=f"{_C_DEFINITIONS} method_definition method_declaration struct_specifier enum_specifier",
                 groups=f"implementation_definition {_C_GROUPS}", wrappers="declaration"),
    CodeLanguage("fortran", "f90 f95 f03 f08 f for ftn", "tree_sitter_fortran", containers="module submodule",
                 definitions="function subroutine program derived_type_definition", groups="internal_procedures"),
    CodeLanguage("perl", "pl pm", "tree_sitter_perl", containers="package_statement class_statement",
                 definitions="subroutine_declaration_statement method_declaration_statement", groups="block",
                 interpreters="perl"),
    CodeLanguage("solidity", "sol", "tree_sitter_solidity",
                 containers="contract_declaration library_declaration interface_declaration",
                 definitions="function_definition modifier_definition constructor_definition event_definition struct_declaration "
                 "enum_declaration fallback_receive_definition"),
)  # fmt: skip
LANGUAGES: Mapping[str, CodeLanguage] = MappingProxyType({language.name: language for language in _ALL})
_BY_SUFFIX = {suffix: language.name for language in _ALL for suffix in language.suffixes.split()}
_BY_FILE_NAME = {name: language.name for language in _ALL for name in language.file_names.split()}
_BY_INTERPRETER = {name: language.name for language in _ALL for name in language.interpreters.split()}

_SHEBANG = re.compile(rb"#!\s*(?:\S*/)?(?:env\s+(?:-\S+\s+)*)?([A-Za-z]+[\d.]*)")
_OBJC = re.compile(rb"^\s*(?:@(?:interface|implementation|protocol|import|class)\b|#import\b)", re.M)
_CPP = re.compile(rb"^\s*(?:class|namespace|template|using|public:|private:)\b", re.M)

_HEAD = 4096  # bytes in which a program shows its language
_PYTHON = re.compile(rb"\n(?:import \w|from [\w.]+ import |(?:async )?def \w+\(|class \w+[:(])")
NAMELESS = frozenset({"", "txt", "text", "dat", "data", "bak", "old", "out"})  # suffixes that say nothing


def suffix_of(name: str) -> str:
    """The lower-case part after the last dot of a path's last segment; "" where there is none."""
    _, dot, suffix = name.rsplit("/", 1)[-1].rpartition(".")
    return suffix.lower() if dot else ""


def language_of(data: bytes, name: str) -> str | None:
    """The language a file is written in: by its interpreter line, its name, and its content where the name leaves
    it open; None where it is none of these."""
    suffix = suffix_of(name)
    named = _BY_SUFFIX.get(suffix) or _BY_FILE_NAME.get(name.rsplit("/", 1)[-1].lower())
    shebang = _SHEBANG.match(data)
    if shebang and (spoken := _interpreted(shebang[1].decode("ascii"))) and (named is None or not suffix):
        return spoken
    if suffix in {"h", "m"} and _OBJC.search(data):
        return "objc"
    if suffix == "m":
        return None  # MATLAB, or Mathematica
    if named is None:
        return "python" if _is_python(data) else spoken_in(data[:_HEAD])
    return "cpp" if suffix == "h" and _CPP.search(data) else named


def _is_python(data: bytes) -> bool:
    """Whether this is a whole Python program, not only a text that speaks of one."""
    if not _PYTHON.search(b"\n" + data):
        return False
    try:
        with warnings.catch_warnings():  # of the program's own oddities
            warnings.simplefilter("ignore")
            ast.parse(data)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _interpreted(interpreter: str) -> str | None:
    name = interpreter.lower()
    return _BY_INTERPRETER.get(name) or _BY_INTERPRETER.get(name.rstrip("0123456789."))
