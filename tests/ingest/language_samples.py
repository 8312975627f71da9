"""A small real file in every language of the table: its name, its text, what to look for.

`words` stand in one definition; `comment` is the line above that belongs to it; `path` and `header` are those of
the class around it, if the sample has one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    file: str
    text: str
    words: str
    comment: str
    path: tuple[str, ...] = ()
    header: str = ""


SAMPLES: dict[str, Sample] = {
    "python": Sample(
        "till.py", 'class Till(Base):\n    """A till."""\n\n    # Goes.\n    @cache\n    def go(self):\n        return 1\n',
        "def go", "# Goes.", ("Till",), "class Till(Base):"),
    "javascript": Sample(
        "till.js", "import x from 'x';\n\nexport class Till extends Base {\n  rate = 1;\n\n  // Goes.\n  go() {\n"
        "    return 1;\n  }\n}\n\nconst stop = () => {\n  halt();\n};\n",
        "go() {", "// Goes.", ("Till",), "export class Till extends Base"),
    "typescript": Sample(
        "till.ts", "interface I {\n  x: number;\n}\n\nexport class Till<T> implements I {\n  x = 1;\n\n  // Goes.\n"
        "  go(): T {\n    return this.t;\n  }\n}\n", "go(): T", "// Goes.", ("Till",), "export class Till<T> implements I"),
    "tsx": Sample(
        "till.tsx", "class Till extends React.Component {\n  x = 1;\n\n  /* Goes. */\n  go() {\n    return <b>x</b>;\n  }\n}\n",
        "<b>x</b>", "/* Goes. */", ("Till",), "class Till extends React.Component"),
    "java": Sample(
        "Till.java", "package shop;\n\npublic class Till extends Base {\n  int x;\n\n  /** Goes. */\n  @Override\n"
        "  int go() {\n    return x;\n  }\n}\n", "int go()", "/** Goes. */", ("Till",), "public class Till extends Base"),
    "go": Sample(
        "till.go", "package shop\n\nvar x = 1\n\n// Go goes.\nfunc (t *Till) Go() int {\n\treturn 1\n}\n",
        "Go() int", "// Go goes."),
    "c": Sample(
        "till.c", "#ifdef SHOP\n#include <x.h>\n\n/* Goes. */\nstatic int go(void) {\n  return 1;\n}\n#endif\n",
        "int go(void)", "/* Goes. */"),
    "cpp": Sample(
        "till.cpp", "namespace shop {\nclass Till : public Base {\n public:\n  // Goes.\n  template <class T>\n"
        "  int go(T a) { return 1; }\n};\n}\n", "int go(T a)", "// Goes.", ("shop", "Till"),
        "namespace shop\nclass Till : public Base"),
    "rust": Sample(
        "till.rs", "struct Till;\n\nimpl Sell for Till {\n    const X: i32 = 1;\n\n    /// Goes.\n    #[inline]\n"
        "    fn go(&self) -> i32 {\n        1\n    }\n}\n", "fn go", "/// Goes.", ("Till",), "impl Sell for Till"),
    "csharp": Sample(
        "Till.cs", "using System;\n\nnamespace Shop {\n  public class Till : Base {\n    int x;\n\n    // Goes.\n    [Test]\n"
        "    public int Go(int a) {\n      return a;\n    }\n  }\n}\n", "public int Go", "// Goes.", ("Shop", "Till"),
        "namespace Shop\npublic class Till : Base"),
    "ruby": Sample(
        "till.rb", "module Shop\n  # Sells.\n  class Till < Base\n    attr_reader :x\n\n    # Goes.\n    def go(a)\n      a\n"
        "    end\n  end\nend\n", "def go", "# Goes.", ("Shop", "Till"), "module Shop\nclass Till < Base"),
    "php": Sample(
        "till.php", "<?php\nnamespace Shop;\n\nclass Till extends Base {\n  private $x;\n\n  /** Goes. */\n"
        "  public function go($a) {\n    return $a;\n  }\n}\n", "function go", "/** Goes. */", ("Till",),
        "class Till extends Base"),
    "bash": Sample("till.sh", "set -e\n\n# Goes.\ngo() {\n  echo hi\n}\n\ngo\n", "echo hi", "# Goes."),
    "scala": Sample(
        "Till.scala", "package shop\n\nobject Till extends Base {\n  val x = 1\n\n  // Goes.\n  def go(a: Int): Int = a\n}\n",
        "def go", "// Goes.", ("Till",), "object Till extends Base"),
    "kotlin": Sample(
        "Till.kt", "package shop\n\nclass Till : Base() {\n    val x = 1\n\n    // Goes.\n    @Test\n"
        "    fun go(a: Int): Int {\n        return a\n    }\n}\n", "fun go", "// Goes.", ("Till",), "class Till : Base()"),
    "swift": Sample(
        "Till.swift", "import UIKit\n\nclass Till: Base {\n  var x = 1\n\n  // Goes.\n  @objc func go(a: Int) -> Int {\n"
        "    return a\n  }\n}\n", "func go", "// Goes.", ("Till",), "class Till: Base"),
    "lua": Sample(
        "till.lua", "local M = {}\n\n-- Goes.\nfunction M.go(a)\n  return a\nend\n\n"
        "M.stop = function() return 1 end\n\nreturn M\n",
        "M.go", "-- Goes."),
    "css": Sample(
        "till.css", "@media (min-width: 3px) {\n  .stop { color: red; }\n  /* Goes. */\n  .go { color: blue; }\n}\n",
        ".go", "/* Goes. */", ("@media (min-width: 3px)",), "@media (min-width: 3px)"),
    "sql": Sample(
        "till.sql", "CREATE TABLE till (a INT);\n\n-- Goes.\nCREATE FUNCTION go(a INT) RETURNS INT AS $$ SELECT a; $$"
        " LANGUAGE sql;\n\nSELECT * FROM till;\n", "CREATE FUNCTION", "-- Goes."),
    "haskell": Sample(
        "Till.hs", "module Shop where\n\nimport X\n\nclass Till a where\n  stop :: a\n\n  -- | Goes.\n"
        "  go :: a -> Int\n  go a = 1\n",
        "go a = 1", "-- | Goes.", ("Till",), "class Till a where"),
    "ocaml": Sample(
        "till.ml", "open X\n\nmodule Till = struct\n  let x = 1\n\n  (* Goes. *)\n  let go a = a\nend\n", "let go", "(* Goes. *)",
        ("Till",), "module Till = struct"),
    "ocaml-interface": Sample("till.mli", "open X\n\n(** Goes. *)\nval go : int -> int\n", "val go", "(** Goes. *)"),
    "elixir": Sample(
        "till.ex", 'defmodule Shop.Till do\n  use X\n\n  # Goes.\n  @doc "x"\n  def go(a) do\n    a\n  end\nend\n',
        "def go", "# Goes.", ("Shop.Till",), "defmodule Shop.Till do"),
    "julia": Sample(
        "till.jl", "module Till\nusing X\n\n# Goes.\nfunction go(a)\n  a\nend\nend\n", "function go", "# Goes.", ("Till",),
        "module Till"),
    "zig": Sample(
        "till.zig", 'const std = @import("std");\n\nconst Till = struct {\n    a: i32,\n\n    /// Goes.\n'
        "    pub fn go() void {}\n};\n",
        "pub fn go", "/// Goes.", ("Till",), "const Till = struct"),
    "hcl": Sample(
        "till.tf", 'variable "v" {}\n\n# Goes.\nresource "aws_x" "go" {\n  a = 1\n}\n', 'resource "aws_x"', "# Goes."),
    "powershell": Sample(
        "till.ps1", "class Till : Base {\n  [int]$x\n\n  # Goes.\n  [int] Go() {\n    return 1\n  }\n}\n", "Go()", "# Goes.",
        ("Till",), "class Till : Base"),
    "groovy": Sample(
        "Till.groovy", "package shop\n\nclass Till extends Base {\n  int stop() { return 2 }\n\n  // Goes.\n"
        "  int go() { return 1 }\n}\n",
        "int go()", "// Goes.", ("Till",), "class Till extends Base"),
    "make": Sample("Makefile", "X = 1\n\n# Goes.\ngo: dep\n\techo hi\n\n.PHONY: go\n", "echo hi", "# Goes."),
    "objc": Sample(
        "Till.m", "#import <X.h>\n\n@implementation Till\n- (int)stop { return 2; }\n\n// Goes.\n- (int)go:(int)a {\n"
        "  return a;\n}\n@end\n", "go:(int)a", "// Goes.", ("Till",), "@implementation Till"),
    "fortran": Sample(
        "till.f90", "module till\n  implicit none\ncontains\n  ! Goes.\n  function go(a) result(b)\n    integer :: a, b\n"
        "    b = a\n  end function go\nend module till\n", "function go(a)", "! Goes.", ("till",), "module till"),
    "perl": Sample(
        "Till.pm", "package Till {\n  use strict;\n\n  # Goes.\n  sub go {\n    my ($a) = @_;\n    return $a;\n  }\n}\n1;\n",
        "sub go", "# Goes.", ("Till",), "package Till"),
    "solidity": Sample(
        "Till.sol", "pragma solidity ^0.8.0;\n\ncontract Till is Base {\n  uint x;\n\n  // Goes.\n"
        "  function go(uint a) public returns (uint) {\n    return a;\n  }\n}\n", "function go", "// Goes.", ("Till",),
        "contract Till is Base"),
}  # fmt: skip
