"""Images of rows: how files spell them, what is refused, their tokens and their pixels."""

from __future__ import annotations

import hashlib
import io
import json
import random
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from transformers import PreTrainedTokenizerBase
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from hybridrl.data.examination import find_duplicates, find_overlap, find_unlike_decoded
from hybridrl.data.examples import lay_out
from hybridrl.data.files import RowFiles
from hybridrl.data.images import begin_to_load
from hybridrl.data.parsing import Columns, RawRow
from hybridrl.data.pixels import SizedImage, load_pixels, read_image, source_of_image
from hybridrl.data.prompts import TokenizedRow
from hybridrl.data.row_table import ROWS_IN_MEMORY, RowTable
from hybridrl.data.rows import IMAGE_MARK, Message, Row, write_record
from hybridrl.data.tokenizing import (
    Resources,
    RowEncoder,
    encode_by_processes,
    encode_rows,
    tokenize_files,
)
from hybridrl.errors import DataError
from hybridrl.images import ImageSettings
from tests.data.tokenized import read_rows
from tests.seeing import IMAGE_PAD, VISION_END, VISION_START, build_tokenizer

SIDE = 28
SETTINGS = ImageSettings(
    placeholder=IMAGE_PAD,
    patch=14,
    merge=2,
    frames=2,
    min_pixels=4 * SIDE**2,
    max_pixels=64 * SIDE**2,
    mean=(0.48145466, 0.4578275, 0.40821073),
    std=(0.26862954, 0.26130258, 0.27577711),
)
ENCODER = RowEncoder(
    tokenizer=build_tokenizer(),
    use_chat_template=True,
    max_prompt_tokens=400,
    overlong="error",
    columns=Columns(),
    images=SETTINGS,
)
MARK = IMAGE_MARK


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder is another one than that of the data."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    drawn(40, 30, "red").save(tmp_path / "red.png")
    drawn(30, 90, "blue").save(tmp_path / "blue.jpg")
    return tmp_path


def drawn(width: int, height: int, colour: str = "red") -> Image.Image:
    return Image.new("RGB", (width, height), colour)


def file_of(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def write_lines(path: Path, *records: Mapping[str, object]) -> Path:
    path.write_text("".join(json.dumps({"answer": "a", **record}) + "\n" for record in records))
    return path


def encode(path: Path, encoder: RowEncoder = ENCODER) -> RowTable:
    files = RowFiles(files=[path], columns=Columns(), key="data.train_files")
    return tokenize_files(files, encoder, Resources())


def colours(row: TokenizedRow) -> list[str]:
    """What each image of a row shows."""
    names: dict[object, str] = {(255, 0, 0): "red", (254, 0, 0): "red", (0, 0, 254): "blue"}
    return [names[read_image(i.source).getpixel((0, 0))] for i in row.images or ()]


def user(*parts: object) -> dict[str, object]:
    return {"role": "user", "content": list(parts)}


def text(words: str) -> dict[str, object]:
    return {"type": "text", "text": words}


# How files spell images


@pytest.mark.parametrize(
    "first",
    [
        {"type": "image", "image": "red.png"},
        {"type": "image", "path": "red.png"},
        {"type": "image", "url": "red.png"},
        {"type": "image_url", "image_url": {"url": "red.png"}},
        {"type": "image_url", "image_url": {"url": "DATA"}},
        {"type": "image", "image": "DATA", "text": None},
    ],
)
def test_parts_of_a_message(first: Mapping[str, object], folder: Path) -> None:
    data = source_of_image(drawn(40, 30))
    part = json.loads(json.dumps(first).replace("DATA", data))
    prompt = [
        {"role": "system", "content": "Look."},
        user(part, text("and"), {"type": "image", "image": "blue.jpg"}, text("<image>?")),
    ]
    path = write_lines(folder / "rows.jsonl", {"prompt": prompt})
    [row] = read_rows(path)
    assert row.prompt == (Message("system", "Look."), Message("user", f"{MARK}and{MARK}<image>?"))
    assert row.images == (
        data if "DATA" in json.dumps(first) else str(folder / "red.png"),
        str(folder / "blue.jpg"),
    )
    assert colours(encode(path)[0]) == ["red", "blue"]


def test_parts_of_a_message_in_a_table_have_all_fields(folder: Path) -> None:
    image = {"type": "image", "image": {"bytes": file_of(drawn(40, 30)), "path": None}}
    prompt = [user({**image, "text": None}, {**text("what?"), "image": None})]
    table = pyarrow.Table.from_pylist([{"prompt": prompt, "answer": "a"}])
    pyarrow.parquet.write_table(table, folder / "rows.parquet")
    [row] = encode(folder / "rows.parquet")
    assert row.row.prompt == (Message("user", f"{MARK}what?"),)
    assert colours(row) == ["red"]


def as_bytes(path: Path) -> object:
    return {"bytes": path.read_bytes(), "path": None}


def as_path(path: Path) -> object:
    return {"bytes": None, "path": path.name}


@pytest.mark.parametrize("spell", [as_bytes, as_path, Path.read_bytes, str])
@pytest.mark.parametrize("is_chat", [True, False])
def test_the_column_of_verl(spell: Callable[[Path], object], is_chat: bool, folder: Path) -> None:
    images = [spell(folder / "red.png"), spell(folder / "blue.jpg")]
    words = "<image>and <image> differ?"
    prompt: object = [{"role": "user", "content": words}] if is_chat else words
    rows = [
        {"prompt": prompt, "images": images, "answer": "a"},
        {"prompt": [{"role": "user", "content": "no"}] if is_chat else "no", "answer": "a"},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    seen, blind = encode(folder / "rows.parquet")
    assert seen.row.prompt == (Message("user", f"{MARK}and {MARK} differ?"),)
    assert colours(seen) == ["red", "blue"]
    assert blind.row.prompt == ((Message("user", "no"),) if is_chat else "no")
    assert blind.images == ()


@pytest.mark.parametrize(
    ("prompt", "contents"),
    [
        ("what?", [f"{MARK}{MARK}what?"]),
        ([{"role": "user", "content": "what?"}], [f"{MARK}{MARK}what?"]),
        (
            [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
            ["s", f"{MARK}{MARK}u"],
        ),
        ([user({"type": "image"}, text("or"), {"type": "image"})], [f"{MARK}or{MARK}"]),
    ],
)
def test_the_column_of_trl_has_no_marks(prompt: object, contents: list[str], folder: Path) -> None:
    record = {"prompt": prompt, "images": ["red.png", "blue.jpg"]}
    [row] = encode(write_lines(folder / "rows.jsonl", record))
    assert [message.content for message in row.row.prompt] == contents  # type: ignore[union-attr]
    assert colours(row) == ["red", "blue"]


@pytest.mark.parametrize("image", ["red.png", {"path": "red.png"}])
def test_a_column_of_one_image_under_another_name(image: object, folder: Path) -> None:
    path = write_lines(
        folder / "rows.jsonl", {"prompt": "p", "image": image}, {"prompt": "q", "image": None}
    )
    seen, blind = read_rows(path, columns=Columns(images="image"))
    assert (seen.images, blind.images) == ((str(folder / "red.png"),), ())
    assert read_rows(path)[0].images == ()


FUNCTION = """
import hashlib
import io
from PIL import Image

def rows():
    photo = io.BytesIO()
    exif = Image.Exif()
    exif[274] = 6  # turned
    Image.new("RGB", (40, 30), "red").save(photo, "JPEG", exif=exif)
    grey = Image.new("I;16", (50, 50), 256 * 100)
    cmyk = Image.new("CMYK", (60, 60), (0, 255, 255, 0))
    yield {"prompt": "<image><image>", "answer": "a", "images": [Image.open(photo), grey]}
    yield {
        "prompt": [{"role": "user", "content": [{"type": "image", "image": cmyk}]}],
        "answer": "a",
    }
    yield {"prompt": "p", "answer": "a", "images": ["red.png"]}
"""


def test_images_of_pillow_and_paths_beside_its_file_from_a_function(folder: Path) -> None:
    (folder / "mine.py").write_text(FUNCTION)
    first, second, third = encode(folder / "mine.py:rows")
    photo, grey = map(read_image, first.row.images)
    assert (photo.size, photo.getpixel((0, 0))) == ((30, 40), (254, 0, 0))
    assert (grey.size, grey.getpixel((0, 0))) == ((50, 50), (100, 100, 100))
    assert read_image(second.row.images[0]).getpixel((0, 0)) == (255, 0, 0)
    assert colours(third) == ["red"]


# What is refused


def png_header(width: int, height: int) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + crc

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b""))


def moving() -> bytes:
    frames = [drawn(9, 9, "blue"), drawn(9, 9, "green")]
    return file_of(drawn(9, 9), "GIF", save_all=True, append_images=frames)


BAD_FILES: dict[str, tuple[Callable[[], bytes] | None, str]] = {
    "missing": (None, "there is no image .*bad.* paths begin at the file with them"),
    "empty": (lambda: b"", "no image of PNG, JPEG"),
    "no image": (lambda: b"hello", "no image of PNG, JPEG"),
    "of a program": (lambda: file_of(drawn(9, 9), "EPS"), "no image of PNG, JPEG"),
    "cut PNG": (lambda: file_of(drawn(300, 300))[:-50], "cannot be read"),
    "cut JPEG": (lambda: file_of(drawn(300, 300), "JPEG")[:-500], "cannot be read: image file is"),
    "moving": (moving, "has 3 frames, and may have 1"),
    "bomb": (lambda: png_header(60_000, 60_000), "more than 50,000,000 pixels; make it smaller"),
    "large": (lambda: png_header(10_000, 10_000), "more than 50,000,000 pixels; make it smaller"),
    "rather large": (lambda: png_header(10_000, 5_001), "more than 50,000,000 pixels; make it"),
    "narrow": (lambda: file_of(drawn(1, 300)), "1 x 300 pixels is too narrow"),
    "32 bits": (lambda: file_of(Image.new("F", (9, 9)), "TIFF"), "has 32 bits a colour"),
}


@pytest.mark.parametrize("fault", BAD_FILES)
def test_a_bad_file_is_named_with_its_row(fault: str, folder: Path) -> None:
    make, reason = BAD_FILES[fault]
    if make is not None:
        (folder / "bad").write_bytes(make())
    good = {"prompt": "p", "images": ["red.png"]}
    path = write_lines(folder / "rows.jsonl", good, {"prompt": "q", "images": ["bad"]})
    with pytest.raises(DataError, match=rf"1 of 2 rows are malformed.*\n.*jsonl:2: .*{reason}"):
        encode(path)


ONE, TWO = ["red.png"], ["red.png", "red.png"]
BAD_ROWS: dict[str, tuple[dict[str, object], str]] = {
    "fewer": ({"prompt": "<image><image>", "images": ONE}, "has more places for images than im"),
    "more": ({"prompt": "<image>", "images": TWO}, "has 1 images more than places for them"),
    "no column": ({"prompt": [user({"type": "image"})]}, "has more places for images than images"),
    "link": ({"prompt": "p", "images": ["https://a.b/c.png"]}, "download it, and give its path"),
    "number": ({"prompt": "p", "images": [7]}, "has the image 7, must be a path, bytes, a data"),
    "nothing": ({"prompt": "p", "images": [{"path": None}]}, "has the image None, must be a path"),
    "film": ({"prompt": [user({"type": "video", "video": "a"})]}, "must be of type text or image"),
    "words": ({"prompt": [user("words")]}, "has the part 'words', must be of type text or image"),
    "no words": ({"prompt": [user()]}, "has a message without text and image"),
    "no base64": ({"prompt": "p", "images": ["data:image/png;base64,?"]}, "holds no base64"),
    "no data": ({"prompt": "p", "images": ["data:image/png,a"]}, "must hold base64"),
    "half a pair": ({"prompt": [user(text("\ud800"))]}, "half of a pair"),
    "mark of a column": ({"prompt": f"a{MARK}", "images": ONE}, "has the character '.ufffc'"),
    "mark and places": ({"prompt": f"{MARK}<image>", "images": ONE}, "has the character '.ufffc'"),
    "mark of a part": (
        {"prompt": [user(text(f"a{MARK}"), {"type": "image", "image": "red.png"})]},
        "has the character '.ufffc'",
    ),
    "placeholder": (
        {"prompt": [{"role": "assistant", "content": "<|image_pad|>"}], "images": ONE},
        r"has 1 images, and its text 2 of their placeholders \(token 5\)",
    ),
    "placeholder of no image": (
        {"prompt": [{"role": "assistant", "content": "<|image_pad|>"}]},
        "has 0 images, and its text 1 of their placeholders",
    ),
}


@pytest.mark.parametrize("fault", BAD_ROWS)
def test_a_bad_row_is_named(fault: str, folder: Path) -> None:
    record, reason = BAD_ROWS[fault]
    path = write_lines(folder / "rows.jsonl", {"prompt": "p", "images": ONE}, record)
    with pytest.raises(DataError, match=rf"1 of 2 rows are malformed.*\n.*jsonl:2: .*{reason}"):
        encode(path)


def test_images_for_a_model_of_text(folder: Path) -> None:
    path = write_lines(folder / "rows.jsonl", {"prompt": "p"}, {"prompt": "p", "images": ONE})
    blind = replace(ENCODER, images=None)
    with pytest.raises(DataError, match="jsonl:2: has 1 images, and the model sees none") as caught:
        encode(path, blind)
    assert "data.images_key=null" in str(caught.value)
    files = RowFiles(files=[path], columns=Columns(images=None), key="data.train_files")
    assert len(tokenize_files(files, blind, Resources())) == 2


def test_a_moving_image_of_pillow(folder: Path) -> None:
    raw = RawRow(
        {"prompt": "p", "answer": "a", "images": [Image.open(io.BytesIO(moving()))]}, "", "f:1"
    )
    assert ENCODER([raw]).malformed == [
        "f:1: the image of Pillow has 3 frames, and may have 1; take one"
    ]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_a_broken_file_is_an_image_or_named(kind: str, folder: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (20, 20, 3), np.uint8)
    whole = file_of(Image.fromarray(noise), kind)
    source = random.Random(kind)
    num_read = 0
    for _ in range(60):
        broken = bytearray(whole)
        for _ in range(source.randint(1, 8)):
            broken[source.randrange(min(200, len(whole)))] = source.randrange(256)
        (folder / "broken").write_bytes(broken)
        try:
            num_read += read_image(str(folder / "broken")).mode == "RGB"
        except DataError as error:
            assert "broken" in str(error)
    assert num_read < 60


# Colours and shapes

HALF = np.array([[0, 255, 256, 25_600, 65_535]], np.uint16)
COLOURS: dict[str, tuple[Image.Image, str, list[tuple[int, int, int]]]] = {
    "CMYK": (Image.new("CMYK", (1, 1), (0, 255, 255, 0)), "TIFF", [(255, 0, 0)]),
    "clear": (Image.new("RGBA", (1, 1), (0, 0, 0, 0)), "PNG", [(255, 255, 255)]),
    "half clear": (Image.new("RGBA", (1, 1), (255, 0, 0, 128)), "PNG", [(255, 127, 127)]),
    "grey": (Image.new("L", (1, 1), 77), "PNG", [(77, 77, 77)]),
    "grey, clear": (Image.new("LA", (1, 1), (0, 0)), "PNG", [(255, 255, 255)]),
    "palette": (Image.new("RGB", (1, 1), "red").convert("P"), "PNG", [(255, 0, 0)]),
    "black": (Image.new("1", (1, 1), 1), "PNG", [(255, 255, 255)]),
    "16 bits": (Image.fromarray(HALF), "PNG", [(v >> 8,) * 3 for v in HALF[0].tolist()]),
    "16 bits, big": (
        Image.fromarray(HALF.astype(">u2")),
        "TIFF",
        [(v >> 8,) * 3 for v in HALF[0].tolist()],
    ),
}


@pytest.mark.parametrize("name", COLOURS)
@pytest.mark.parametrize("is_file", [True, False])
def test_colours(name: str, is_file: bool, folder: Path) -> None:
    image, kind, expected = COLOURS[name]
    source = source_of_image(image)
    if is_file:
        (folder / "one").write_bytes(file_of(image, kind))
        source = str(folder / "one")
    read = read_image(source)
    pixels = [read.getpixel((x, 0)) for x in range(read.width)]
    assert (read.mode, pixels) == ("RGB", expected)


def test_a_photo_with_smaller_copies_does_not_move(folder: Path) -> None:
    drawn(40, 30).save(
        folder / "photo.jpg", "MPO", save_all=True, append_images=[drawn(4, 3, "blue")]
    )
    with Image.open(folder / "photo.jpg") as photo:
        assert (photo.format, photo.n_frames) == ("MPO", 2)  # type: ignore[attr-defined]
    read = read_image(str(folder / "photo.jpg"))
    assert (read.size, read.getpixel((0, 0))) == ((40, 30), (254, 0, 0))


SIZES = [(1, 1), (40, 30), (30, 40), (2, 300), (600, 3), (57, 57), (500, 700), (224, 224)]


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_tokens_and_pixels_are_those_of_transformers(width: int, height: int) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (height, width, 3), np.uint8)
    source = source_of_image(Image.fromarray(noise))
    [row] = encode_rows(
        [Row((Message("user", f"a{MARK}b"),), "a", "s", "f:1", images=(source,))], ENCODER
    )
    [image] = row.images or ()
    processor = Qwen2VLImageProcessorPil(
        patch_size=14,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": SETTINGS.min_pixels, "longest_edge": SETTINGS.max_pixels},
    )
    of_file = processor(images=[Image.fromarray(noise)], return_tensors="pt")
    of_resized = processor(images=[Image.fromarray(load_pixels(image))], return_tensors="pt")
    assert of_file["image_grid_thw"].tolist() == of_resized["image_grid_thw"].tolist()
    assert image.num_tokens == int(of_file["image_grid_thw"].prod()) // 2**2
    expanded = [VISION_START, *[IMAGE_PAD] * image.num_tokens, VISION_END]
    token_ids = row.token_ids.tolist()
    at = token_ids.index(VISION_START)
    assert token_ids[at : at + len(expanded)] == expanded
    assert token_ids.count(IMAGE_PAD) == image.num_tokens
    torch.testing.assert_close(of_file["pixel_values"], of_resized["pixel_values"])


# Lengths


def test_a_row_that_is_too_long_with_its_images(folder: Path) -> None:
    long = {"prompt": "p" * 30, "images": TWO}
    path = write_lines(
        folder / "rows.jsonl", long, {"prompt": "p", "images": ONE}, {"prompt": "q" * 40}
    )
    lengths = [len(row.token_ids) for row in encode(path)]
    limited = replace(ENCODER, max_prompt_tokens=lengths[0] - 1)
    with pytest.raises(DataError, match=rf"jsonl:1 \({lengths[0]} tokens\)"):
        encode(path, limited)
    dropped = encode(path, replace(limited, overlong="drop"))
    assert (len(dropped), dropped.num_dropped) == (2, 1)
    with pytest.raises(
        DataError, match=rf"1 of 3 rows.*\n.*jsonl:1: takes {lengths[0]} tokens with its images"
    ):
        encode(path, replace(limited, overlong="keep_end"))
    [text_row] = encode(
        write_lines(folder / "text.jsonl", {"prompt": "q" * 40}),
        replace(ENCODER, max_prompt_tokens=20, overlong="keep_end"),
    )
    assert (len(text_row.token_ids), text_row.images) == (20, ())


# The same rows again


def row_facts(rows: Sequence[TokenizedRow]) -> list[tuple[object, ...]]:
    return [(row.row, row.prompt_text, row.token_ids.tolist(), row.images) for row in rows]


def test_rows_of_a_kept_file_are_those_that_were_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridrl.data.row_table.ROWS_IN_MEMORY", 2)
    assert ROWS_IN_MEMORY > 2
    path = write_lines(
        folder / "rows.jsonl",
        {"prompt": "<image>or<image>", "images": ["red.png", "blue.jpg"]},
        {"prompt": "p"},
        {"prompt": "q", "images": ONE},
    )
    files = RowFiles(files=[path], columns=Columns(), key="data.train_files")
    resources = Resources(folder=folder / "kept")
    first = tokenize_files(files, ENCODER, resources)
    (folder / "red.png").rename(folder / "other.png")  # read once
    again = tokenize_files(files, ENCODER, resources)
    assert row_facts(again) == row_facts(first) == row_facts(first[:])
    assert again.fingerprint == first.fingerprint
    with pytest.raises(DataError, match=r"there is no image"):
        tokenize_files(
            files, replace(ENCODER, images=replace(SETTINGS, max_pixels=50_000)), resources
        )


def test_processes_encode_images_as_one_does(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    pillow: dict[str, object] = {"prompt": "<image>", "answer": "a", "images": [drawn(50, 50)]}
    bad: dict[str, object] = {"prompt": "p", "answer": "a", "images": ["none.png"]}
    good: dict[str, object] = {"prompt": "p", "answer": "a", "images": TWO}
    chunk = [RawRow(record, "s", f"{folder}/f:{n}") for n, record in enumerate([pillow, bad, good])]

    def chunks() -> Iterator[list[RawRow]]:
        while "a process begins to tokenize: 0 to come" not in caplog.text:
            yield chunk
            time.sleep(0.02)
        yield chunk

    *_, last = encode_by_processes(ENCODER, chunks(), num_processes=1)
    assert last == ENCODER(chunk)
    assert (last.num_rows, last.batch.num_rows, len(last.malformed)) == (2, 2, 1)


# What looks at rows


def test_rows_of_equal_text_and_other_images_are_other_rows(folder: Path) -> None:
    records = [{"prompt": "p", "images": ["red.png"]}, {"prompt": "p", "images": ["blue.jpg"]}]
    rows = encode(write_lines(folder / "rows.jsonl", records[0], {**records[1], "answer": "b"}))
    assert rows[0].prompt_text == rows[1].prompt_text
    assert [found.examples for found in find_duplicates(rows)] == [[], []]
    [overlap] = find_overlap(rows[:1], {"": rows[1:]})
    assert overlap.examples == []
    [overlap] = find_overlap(rows[:1], {"": rows[:1]})
    assert len(overlap.examples) == 1


def test_repeated_placeholders_are_not_another_text(folder: Path) -> None:
    path = write_lines(folder / "rows.jsonl", {"prompt": "<image>or<image>", "images": TWO})
    assert find_unlike_decoded(encode(path)[:], ENCODER.tokenizer).examples == []


def test_turns_are_learned_behind_images(folder: Path) -> None:
    prompt = [
        {"role": "user", "content": "<image>what?"},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": "<image>and?"},
    ]
    path = write_lines(folder / "rows.jsonl", {"prompt": prompt, "images": ["red.png", "blue.jpg"]})
    [(token_ids, mask)] = lay_out(encode(path)[:], ENCODER.tokenizer, learns_all_turns=True)
    assert len(token_ids) == len(mask)
    assert ENCODER.tokenizer.decode(token_ids[mask]) == "red<|im_end|>a<|im_end|>"


# Pixels


def sized(source: str, *, file_size: tuple[int, int] = (40, 30)) -> SizedImage:
    return SizedImage(source, 28, 56, SIDE, IMAGE_PAD, file_size[1], file_size[0])


@pytest.mark.usefixtures("ray_cluster")
def test_images_are_fetched_once_and_a_file_that_vanished_is_named(folder: Path) -> None:
    red, blue = sized(str(folder / "red.png")), sized(str(folder / "blue.jpg"), file_size=(30, 90))
    first, second = begin_to_load([[red, blue], [red]])
    assert first[0] is second[0]
    assert (first[0].rows, first[0].columns) == (1, 2)
    assert np.array_equal(first[0].fetch(), load_pixels(red))
    assert np.array_equal(first[1].fetch(), load_pixels(blue))
    assert first[0].identity != first[1].identity
    drawn(20, 20).save(folder / "red.png")
    [[changed]] = begin_to_load([[red]])
    assert changed.identity != first[0].identity
    with pytest.raises(
        DataError, match=r"red.png' has 20 x 20 pixels, and had 40 x 30 when its row"
    ):
        changed.fetch()
    (folder / "red.png").unlink()
    with pytest.raises(DataError, match=r"red.png' is there no more .*bring it back"):
        begin_to_load([[red]])


# Rows of text

TEXT_ROWS: list[dict[str, object]] = [
    {"prompt": f"plain <image> text {MARK}", "answer": "a"},
    {
        "prompt": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": f"<image>{MARK}?"},
            {"role": "assistant", "content": "b<|eos|>"},
        ],
        "answer": 7,
        "source": "sums",
    },
    {"prompt": "e\u0301 \U0001f600", "answer": "c", "images": None, "rejected": "d", "level": 2.5},
]


def test_rows_of_text_are_those_of_before(
    folder: Path, chat_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Both digests were computed by the code that knew no images, 37927796."""
    records = [{"rejected": "no", "level": 0, **record} for record in TEXT_ROWS]
    path = write_lines(folder / "rows.jsonl", *records)
    columns = Columns(rejected="rejected", difficulty="level")
    encoder = RowEncoder(
        tokenizer=chat_tokenizer, use_chat_template=True, max_prompt_tokens=100, overlong="error"
    )
    files = RowFiles(files=[path], columns=columns, key="data.train_files")
    table = tokenize_files(files, encoder, Resources())
    digest = hashlib.sha256()
    for row in table:
        tokens = str(row.token_ids.tolist()).encode()
        digest.update(write_record(row.row) + row.prompt_text.encode() + tokens)
    assert table.fingerprint == "7fdd767fac5123f50254857f8c708886db40063be025b36f4262ab582be93bc1"
    assert digest.hexdigest() == "5687e2c74b4f0450e365361067a8ce6e237467bfc3144788f6c4bf17b1d00291"
