"""Folders checked first, numbers before pictures, and a picture that cannot be drawn is one warning."""

import os
import pathlib
import warnings

import matplotlib as mpl
import pytest

from otattn.plotting.style import axes
from otattn.report.draft import Draft
from otattn.report.output import draw, prepare_folder, say, short_warnings, write_text
from otattn.report.section import Section

HEAD = {"layer": "x", "heads": 1, "windows": 1, "tokens_per_window": 2, "dimension": 2, "seed": 0}


def test_folders_are_made_and_checked(tmp_path):
    folder = prepare_folder(tmp_path / "a" / "b", ["x.json"])
    assert folder.is_dir()
    assert list(folder.iterdir()) == []
    assert prepare_folder(str(folder), ["x.json"]) == folder
    (folder / "x.json").write_text("{}")
    prepare_folder(folder, ["x.json"])
    assert (folder / "x.json").read_text() == "{}"


def test_what_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "x.json").mkdir()
    for out in (tmp_path / "file", tmp_path / "file" / "below", "", "\0", tmp_path / ("n" * 300)):
        with pytest.raises(ValueError, match="--out must be"):
            prepare_folder(out, name="--out")
    with pytest.raises(ValueError, match=r"x\.json can be written"):
        prepare_folder(tmp_path, ["x.json"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ValueError, match="Permission"):
        prepare_folder(tmp_path)


def picture():
    ax = axes()
    ax.plot([0, 1], [0, 1])
    ax.set_title("a title")
    return ax


def test_numbers_are_written_before_pictures_and_without_them(tmp_path):
    """The second picture fails in its function, the third when it is rendered; the text says so."""

    def fails():
        assert (tmp_path / "report.json").exists()
        assert (tmp_path / "report.md").exists()
        raise RuntimeError("latex could not be\nfound")

    def fails_late():
        ax = picture()
        ax.set_title("$\\unknown$")
        return ax

    section = Section("Part", ["text"], {"value": 1.5}, {"a.png": picture, "b.png": fails, "c.png": fails_late})
    draft = Draft(tmp_path, HEAD, ["part"])
    with pytest.warns(UserWarning, match="was not drawn") as seen:
        draft.add("part", section)
    data = draft.finish([section])
    assert [str(w.message).split(" (")[0] for w in seen] == ["b.png was not drawn", "c.png was not drawn"]
    assert all("\n" not in str(w.message) for w in seen)
    assert data["sections"]["Part"] == {"value": 1.5}
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "![Part](a.png)" in text
    assert "(b.png was not drawn: RuntimeError: latex could not be found)" in text
    assert "c.png)" not in text.replace("(c.png was not", "")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.png", "report.html", "report.json", "report.md"]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/svg+xml;base64,") == 1
    assert "b.png was not drawn: RuntimeError: latex could not be found" in page


def test_latex_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with mpl.rc_context({"text.usetex": True}), pytest.warns(UserWarning, match=r"x\.png was not drawn"):
        assert draw(picture, tmp_path / "x.png") is not None
    assert not (tmp_path / "x.png").exists()


def test_a_font_that_is_not_there(tmp_path, caplog):
    with mpl.rc_context({"font.family": "no such font"}):
        assert draw(picture, tmp_path / "x.png") is None
    assert (tmp_path / "x.png").exists()
    assert caplog.records == []


class Terminal:
    def __init__(self, encoding):
        self.encoding, self.text = encoding, ""

    def write(self, text):
        text.encode(self.encoding)
        self.text += text

    def flush(self):
        pass


@pytest.mark.parametrize(("encoding", "expected"), [("ascii", "1 +- 2 <= x^2 \\u0394\n"), ("utf-8", "1 ± 2 ≤ x² Δ\n")])
def test_any_terminal(encoding, expected, monkeypatch):
    terminal = Terminal(encoding)
    monkeypatch.setattr("sys.stdout", terminal)
    say("1 ± 2 ≤ x² Δ")
    assert terminal.text == expected


def test_warnings_are_one_line(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with short_warnings():
            warnings.warn("two\nlines", UserWarning, stacklevel=1)
    assert capsys.readouterr().err == "otattn: warning: two lines\n"


def test_names_in_any_alphabet_are_written(tmp_path):
    write_text(pathlib.Path(tmp_path), "x.md", "caf\udce9 é")
    assert (tmp_path / "x.md").read_text(encoding="utf-8") == "caf\\udce9 é"
