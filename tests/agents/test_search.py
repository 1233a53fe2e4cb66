from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from hybridrl.agents.built_in import SearchIndex
from hybridrl.agents.tool_calls import ToolCall
from hybridrl.agents.tool_process import ToolLimits
from hybridrl.agents.tools import Toolbox, load_tools, with_index
from hybridrl.errors import AgentError

pytest.importorskip("bm25s", reason="the extra search is not installed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "more").mkdir()
    (tmp_path / "bern.txt").write_text("Bern has bears.\n\nThe river is the Aare.\n")
    (tmp_path / "more" / "basel.md").write_text(
        f"Basel lies on the Rhine.\n\n{'word ' * 300}\n\nFish"
    )
    (tmp_path / "data.bin").write_bytes(b"\xff")
    return tmp_path


def test_the_model_gets_the_passages_that_fit_best(folder: Path) -> None:
    tools = with_index(load_tools(["calculator", "search"]), str(folder))
    toolbox = Toolbox(tools, limits=ToolLimits(timeout_s=20, max_chars=200), num_processes=1)

    def ask(query: str) -> str:
        result = asyncio.run(toolbox.call(ToolCall("search", {"query": query})))
        assert not result.is_error
        return result.text

    assert ask("the Rhine river, please").startswith("more/basel.md: Basel lies on the Rhine.")
    assert ask("bears") == "bern.txt: Bern has bears.\nThe river is the Aare."
    assert ask("zebra") == ask("") == "Nothing was found; try other words"
    assert tools[1].parameters["required"] == ["query"]


def test_a_folder_without_texts_is_refused(folder: Path) -> None:
    with pytest.raises(AgentError, match=r"missing has no file with the ending \.txt or \.md"):
        SearchIndex(folder / "missing")
    (folder / "bad.txt").write_bytes(b"\xff")
    with pytest.raises(AgentError, match=r"bad\.txt cannot be read: .*correct or remove it"):
        SearchIndex(folder)
    (folder / "more" / "basel.md").write_text(" \n")
    with pytest.raises(AgentError, match="has no words in its files"):
        SearchIndex(folder / "more")
