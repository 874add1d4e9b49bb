"""Notices and tags that lie in the host's own folder."""

from __future__ import annotations

import pytest

from spotfleet import interruptions
from spotfleet.errors import NoticeFormat
from spotfleet.interruptions.folder import FolderSource
from spotfleet.model import Notice

WHY = "this machine is taken from the fleet"


def test_a_notice_counts_down_and_is_withdrawn_with_its_file(tmp_path):
    now = 100.0
    source = FolderSource(str(tmp_path), lambda: now)
    assert source.poll() is None
    (tmp_path / "notice.json").write_text('{"ends_at": 130.5}')
    assert source.poll() == Notice(30.5, why=WHY)
    now = 200.0
    assert source.poll() == Notice(0.0, why=WHY)
    (tmp_path / "notice.json").unlink()
    assert source.poll() is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"ends_at": "soon"}', '{"ends_at": true}', '{"ends_at": null}'])
def test_a_notice_that_cannot_be_read_is_an_error_that_names_the_file(tmp_path, text):
    (tmp_path / "notice.json").write_text(text)
    with pytest.raises(NoticeFormat, match=r"notice\.json"):
        FolderSource(str(tmp_path)).poll()


def test_a_tag_that_is_not_set_is_empty(tmp_path):
    source = FolderSource(str(tmp_path))
    assert source.tag("team") == ""
    (tmp_path / "tags.json").write_text('{"team": "vision"}')
    assert (source.tag("team"), source.tag("other")) == ("vision", "")


def test_agents_of_machines_over_ssh_read_their_own_folder(tmp_path):
    assert isinstance(interruptions.load("ssh", str(tmp_path)), FolderSource)
