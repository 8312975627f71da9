"""One text is one text, in whatever encoding an editor saved it."""

from __future__ import annotations

import codecs
import random

import pytest
from fixtures_work import WordTokenizer

from ingest.chunker import cut
from ingest.encoding import decode, unmarked_wide
from ingest.parsers import parse
from storage.errors import FileError

TEXT = "Zürich — 価格は10円。\nSecond line, “quoted”.\nТретья строка.\n"
ENCODED = {
    "utf-8": TEXT.encode("utf-8"),
    "utf-8 with mark": codecs.BOM_UTF8 + TEXT.encode("utf-8"),
    "utf-16-le with mark": codecs.BOM_UTF16_LE + TEXT.encode("utf-16-le"),
    "utf-16-be with mark": codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be"),
    "utf-32-le with mark": codecs.BOM_UTF32_LE + TEXT.encode("utf-32-le"),
    "utf-32-be with mark": codecs.BOM_UTF32_BE + TEXT.encode("utf-32-be"),
    "utf-16-le bare": TEXT.encode("utf-16-le"),
    "utf-16-be bare": TEXT.encode("utf-16-be"),
    "windows line ends": TEXT.replace("\n", "\r\n").encode("utf-8"),
    "utf-16 from a windows editor": codecs.BOM_UTF16_LE + TEXT.replace("\n", "\r\n").encode("utf-16-le"),
}


@pytest.mark.parametrize("data", ENCODED.values(), ids=ENCODED.keys())
def test_one_text_is_the_same_in_every_unicode_encoding(data: bytes) -> None:
    assert decode(data) == TEXT
    assert parse(data, "note.txt").text == TEXT
    for name in ("note.txt", "note.md", "note.csv", "note.py", "note.yaml", "note.html"):
        plain = parse(TEXT.encode(), name)
        assert cut(parse(data, name), WordTokenizer(), max_tokens=16) == cut(plain, WordTokenizer(), max_tokens=16)


def test_chinese_in_the_old_encoding_is_read() -> None:
    text = "第一条 为了保护合同当事人的合法权益，维护社会经济秩序，制定本法。\n" * 4
    assert decode(text.encode("gb18030")) == text


JAPANESE = "第一条　この契約は、甲と乙との間で締結され、商品の売買に関する条件を定めるものとする。価格は一個につき十円とする。\n"
KOREAN = "제1조 이 계약은 갑과 을 사이의 상품 매매에 관한 조건을 정함을 목적으로 한다. 가격은 한 개에 십 원으로 한다.\n"
TAIWANESE = "第一條 本契約由甲方與乙方簽訂，規定商品買賣之條件。每件商品價格為新臺幣十元，買方應於收到貨物後三十日內付款。\n"
RUSSIAN = "Статья 1. Настоящий договор заключён между продавцом и покупателем. Цена одной единицы товара десять рублей.\n"
POLISH = "Artykuł 1. Niniejsza umowa określa warunki sprzedaży towarów między sprzedawcą a kupującym. Cena: dziesięć złotych.\n"
OLDER = [
    (JAPANESE, "shift_jis"), (JAPANESE, "euc_jp"), (JAPANESE, "iso2022_jp"), (KOREAN, "euc_kr"), (TAIWANESE, "big5"),
    (RUSSIAN, "koi8_r"), (RUSSIAN, "cp1251"), (POLISH, "cp1250"),
]  # fmt: skip


@pytest.mark.parametrize("times", [1, 40])
@pytest.mark.parametrize(("text", "encoding"), OLDER, ids=[encoding for _, encoding in OLDER])
def test_a_sentence_in_an_older_encoding_that_nobody_named_is_read(text: str, encoding: str, times: int) -> None:
    assert decode((text * times).encode(encoding)) == text * times
    assert parse((text * times).encode(encoding), "note.txt").text == text * times


def test_russian_of_old_dos_is_refused_and_not_garbled() -> None:
    with pytest.raises(FileError) as caught:
        decode(RUSSIAN.encode("cp866"))
    assert caught.value.code == "encoding_unknown"


def test_western_text_of_old_windows_is_read() -> None:
    text = "Die Straße nach Köln führt über Düsseldorf; dort gibt es schöne Gärten und große Plätze.\n" * 3
    assert decode(text.encode("cp1252")) == text


def test_an_encoding_the_document_names_is_believed_before_a_guess() -> None:
    assert decode("naïve café".encode("cp1252"), "windows-1252") == "naïve café"
    assert decode("naïve café".encode(), "windows-1252") == "naïve café"
    assert decode("naïve café".encode("cp1252"), "no-such-encoding")


def test_noise_is_refused_and_never_becomes_an_empty_success() -> None:
    noise = random.Random(7).randbytes(5000).replace(b"\0", b"\x01")
    with pytest.raises(FileError) as caught:
        decode(noise)
    assert caught.value.code == "encoding_unknown"


def test_a_guess_that_yields_control_characters_is_no_text() -> None:
    with pytest.raises(FileError) as caught:
        decode(b"caf\xe9 au lait \x01\x02\x03 et voil\xe0", "windows-1252")
    assert caught.value.code == "encoding_unknown"


@pytest.mark.parametrize("size", [40, 41])
def test_text_with_a_stray_nul_is_not_taken_for_wide_text(size: int) -> None:
    data = (b"# a\0b\n\n" + b"words of a text " * 3)[:size]
    assert unmarked_wide(data) is None
    for text in ("Это текст без метки порядка байтов.", "大小 的文字没有标记。\n好", "plain words"):
        assert unmarked_wide(text.encode("utf-16-le")) == "utf-16-le"


@pytest.mark.parametrize("text", ["Short ascii.", "中文。\nabc", "emoji 😀 beyond the first plane\n" * 400])
def test_unmarked_utf_16_is_found_by_its_nuls(text: str) -> None:
    assert decode(text.encode("utf-16-le")) == text
    assert decode(text.encode("utf-16-be")) == text
