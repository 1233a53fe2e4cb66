"""The tool ``search``: passages of a folder of texts, ranked by BM25. Imports bm25s."""

from __future__ import annotations

from pathlib import Path

from hybridrl.errors import AgentError

_SUFFIXES = (".txt", ".md")
_PASSAGE_CHARS = 1000
_NUM_PASSAGES = 3


class SearchIndex:
    """An index of the passages of a folder, held in memory."""

    def __init__(self, folder: Path) -> None:
        """Read and index all .txt and .md files, those of subfolders too.

        Raises:
            AgentError: no such file, a file that is not text in UTF-8, no words, or no bm25s.
        """
        try:
            import bm25s
        except ImportError as error:
            raise AgentError(
                "the tool search needs bm25s: pip install 'hybridrl[search]'"
            ) from error
        self._library = bm25s
        self._passages = [p for file in _files_of(folder) for p in _passages_of(file, folder)]
        self._index = bm25s.BM25()
        words = bm25s.tokenize(self._passages, show_progress=False)
        if not words.vocab or not any(words.ids):
            raise AgentError(f"agent.search_folder={folder} has no words in its files; add texts")
        self._index.index(words, show_progress=False)

    async def search(self, query: str) -> str:
        """Search the documents, and return the passages that fit best.

        Args:
            query: Words to search for
        """
        words = self._library.tokenize([query], show_progress=False, return_ids=False)
        num_passages = min(_NUM_PASSAGES, len(self._passages))
        numbers, scores = self._index.retrieve(words, k=num_passages, show_progress=False)
        best = zip(numbers[0].tolist(), scores[0].tolist(), strict=True)
        passages = [self._passages[number] for number, score in best if score > 0]
        return "\n\n".join(passages) or "Nothing was found; try other words"


def _files_of(folder: Path) -> list[Path]:
    files = sorted(file for file in folder.rglob("*") if file.suffix in _SUFFIXES)
    if not files:
        raise AgentError(
            f"agent.search_folder={folder} has no file with the ending {' or '.join(_SUFFIXES)}"
        )
    return files


def _passages_of(file: Path, folder: Path) -> list[str]:
    """Cut a file at empty lines into passages of about 1,000 characters, each with its name."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AgentError(
            f"agent.search_folder={folder}: {file} cannot be read: {error}; correct or remove it"
        ) from error
    passages = [""]
    for paragraph in filter(None, map(str.strip, text.split("\n\n"))):
        if len(passages[-1]) + len(paragraph) > _PASSAGE_CHARS and passages[-1]:
            passages.append("")
        passages[-1] = f"{passages[-1]}\n{paragraph}".strip()
    return [f"{file.relative_to(folder)}: {passage}" for passage in passages if passage]
