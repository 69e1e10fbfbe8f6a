"""A resumed run reads its original texts, from any current folder."""

from dataclasses import replace
from itertools import permutations
from types import SimpleNamespace

import pytest

from hpc3d.checkpoints.run_text import (
    described,
    differences,
    located,
    recorded,
    tokenized_by,
    trained_on,
    used_by_text,
)
from hpc3d.config.input_file import Config, DataConfig
from hpc3d.data.mixture import open_texts
from hpc3d.data.token_file import open_tokens, write_tokens
from hpc3d.data.tokenizer import ByteTokenizer
from hpc3d.data.tokenizer_files import characters
from hpc3d.data.validation import separate_texts
from tests.runs import plan_of


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Current folder, with three texts."""
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two", "three"):
        (tmp_path / f"{name}.txt").write_text(name * 50)
    return tmp_path


def configured(path="one.txt", validation=None):
    return Config(data=DataConfig(path=str(path), validation=validation))


def of_run(config, run):
    """Return the texts that a checkpoint of a run records."""
    held = [open_tokens(path) for path in config.data.validation_texts()]
    return recorded(described(open_tokens(config.data.path), held), config, run)


def test_data_paths_become_absolute_and_are_tried_first(here, monkeypatch):
    config = located(configured(validation="two.txt"))
    assert config.data.path == str(here / "one.txt")
    assert config.data.validation == str(here / "two.txt")
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    (here / "elsewhere" / "one.txt").write_text("another one")
    assert located(config) == config
    assert located(configured()).data.path == str(here / "elsewhere" / "one.txt")


@pytest.mark.parametrize("validation", [None, "", 0.1])
def test_non_file_data_settings_are_unchanged(here, validation):
    assert located(configured("inputs/corpus", validation)) == configured(
        "inputs/corpus", validation
    )


def test_list_of_validation_texts_is_recorded_and_found_next_to_a_moved_run(here):
    (here / "project").mkdir()
    names = ["one.txt", "two.txt", "three.txt"]
    for name in names:
        (here / name).rename(here / "project" / name)
    paths = [f"project/{name}" for name in names]
    config = located(configured(paths[0], tuple(paths[1:])))
    texts = of_run(config, here / "project" / "run")
    assert [*texts] == ["data.path", "data.validation[0]", "data.validation[1]"]
    (here / "project").rename(here / "moved")
    found = located(config, here / "moved" / "run", texts).data.validation
    assert found == tuple(str(here / "moved" / name) for name in names[1:])


def test_moved_project_finds_its_texts_next_to_the_run(here, monkeypatch):
    run, moved = here / "project" / "results" / "run", here / "moved"
    run.mkdir(parents=True)
    (here / "project" / "one.txt").write_text("one" * 50)
    config = located(configured("project/one.txt"))
    texts = of_run(config, run)
    (here / "project").rename(moved)
    assert located(config, run, texts) == config  # where it was is what a message names
    found = located(config, moved / "results" / "run", texts)
    assert found.data.path == str(moved / "one.txt")
    other = located(configured("none.txt"), moved / "results" / "run", texts)
    assert other.data.path == "none.txt"


@pytest.mark.parametrize("content", ["one" * 51, "ono" + "one" * 49, "on" * 75])
def test_changed_text_is_reported_and_rejected_with_a_held_out_fraction(content, here):
    """The changed text is longer, has the same length, or is another text."""
    config = located(configured())
    before = of_run(config, here)
    assert [*differences(before, of_run(config, here), config)] == []
    (here / "one.txt").write_text(content)
    now = of_run(config, here)
    (line,) = differences(before, now, config)
    assert line.startswith(f"data.path: {here / 'one.txt'} ") and "151 tokens then" in line
    shared = replace(config, data=replace(config.data, validation=0.1))
    with pytest.raises(ValueError, match=r"\Adata\.path: .* data\.validation = 0\.1 .*restore /"):
        [*differences(before, now, shared)]


@pytest.mark.parametrize("gone", ["train.txt", "val.txt"])
def test_a_text_that_disappeared_from_a_folder_is_reported(gone, here):
    (here / "texts").mkdir()
    for name in ("train.txt", "val.txt"):
        (here / "texts" / name).write_text(name * 9)
    config = located(configured("texts"))
    before = of_run(config, here)
    (here / "texts" / gone).unlink()
    now = of_run(config, here)
    (line,) = differences(before, now, config)
    assert line.startswith(
        f"data.path: {here / 'texts'} differs from the text recorded in the checkpoint"
    )
    shared = replace(config, data=replace(config.data, validation=0.1))
    with pytest.raises(ValueError, match=r"data\.validation = 0\.1 is held out; restore /"):
        [*differences(before, now, shared)]


@pytest.mark.parametrize("name", ["val.txt", "val.h5"])
def test_a_validation_text_that_disappeared_is_refused(name, here):
    (here / "val.txt").write_text("validation" * 9)
    write_tokens(here / "val.h5", [here / "val.txt"], ByteTokenizer())
    config = located(configured(validation=name))
    texts = of_run(config, here / "results" / "run")
    (here / name).unlink()
    config = located(config, here / "results" / "run", texts)
    with pytest.raises(ValueError, match=rf"\Adata\.validation: {here / name} does not exist;"):
        separate_texts(config.data.validation_texts(), open_tokens(config.data.path))


def test_changed_validation_text_is_reported(here):
    config = located(configured(validation="two.txt"))
    before = of_run(config, here)
    (here / "two.txt").write_text("more")
    (line,) = differences(before, of_run(config, here), config)
    assert (
        line.startswith(f"data.validation: {here / 'two.txt'} ") and "best evaluation loss" in line
    )


def test_changes_of_a_list_of_validation_texts_are_reported(here):
    def lines(old, new):
        configs = [located(configured(validation=each)) for each in (old, new)]
        return [*differences(*(of_run(each, here) for each in configs), configs[1])]

    assert lines(("two.txt", "three.txt"), ("three.txt", "two.txt")) == []
    (line,) = lines("two.txt", ("three.txt", "two.txt"))
    assert line.startswith(f"data.validation[0]: {here / 'three.txt'} is new; ")
    (line,) = lines(("two.txt", "three.txt"), "three.txt")
    assert line.startswith(f"data.validation: {here / 'two.txt'} is no longer evaluated; ")
    (line,) = lines(("two.txt", "three.txt"), ("two.txt", "one.txt"))
    assert line.startswith(f"data.validation[1]: {here / 'one.txt'} differs ") and "reset" in line


def test_validation_text_that_was_training_text_is_reported(here):
    before = of_run(configured("one.txt", "two.txt"), here)
    config = configured("three.txt", "one.txt")
    first, second, third = differences(before, of_run(config, here), config)
    assert first.startswith("data.path: three.txt ") and "reset" in third
    assert (
        second.startswith("data.validation: one.txt ")
        and "was the training text until now" in second
    )


def test_runs_of_older_versions_have_no_recorded_texts(here):
    assert [*differences({}, of_run(configured(), here), configured(validation=0.1))] == []


@pytest.mark.parametrize(
    ("held", "part"), [("one.txt", ""), ("copy.txt", ""), ("one.h5", ""), (".", "partly ")]
)
def test_validation_text_inside_the_training_text_is_reported(held, part, here):
    """The texts are the same file, a copy, its tokens, or a folder with this and other files."""
    (here / "copy.txt").write_text("one" * 50)
    write_tokens(here / "one.h5", [here / "one.txt"], ByteTokenizer())
    texts = open_tokens("one.txt"), open_tokens(held)
    (line,) = trained_on(texts[0], texts[1:], configured(validation=held))
    assert line.startswith(f"data.validation: {held} is {part}the training text")


def test_shared_documents_are_reported_except_empty_ones(here):
    for folder in ("train", "held"):
        (here / folder).mkdir()
        (here / folder / "empty.txt").write_text("")
        (here / folder / "own.txt").write_text(folder)
    texts = open_tokens("train"), open_tokens("held")
    assert [*trained_on(texts[0], texts[1:], configured())] == []
    (here / "held" / "copy.txt").write_text("train")
    assert [*trained_on(texts[0], [open_tokens("held")], configured(validation="held"))] != []
    assert [*trained_on(texts[0], [], configured())] == []


def test_rank_0_records_the_opened_texts_and_their_notes(here):
    """Tests resolved paths, the texts for the manifest, and the notes for the log."""
    words = ["--data.path", "one.txt", "--data.validation", "one.txt", "--train.eval_every", "1"]
    words += ["--model.sequence", "4", "--train.batch", "4", "--run.out", "out"]
    plan = plan_of(words)
    assert plan.config.data.path == plan.texts["data.validation"]["path"] == str(here / "one.txt")
    assert plan.texts == of_run(plan.config, plan.folder)
    (note,) = plan.notes
    assert "is the training text" in note


def test_character_tokenizer_is_called_by_its_name():
    """In the configuration, it is a bpe tokenizer, as is every tokenizer other than bytes."""
    made = characters({"a": 0, "b": 1})
    tokens = SimpleNamespace(tokenizer=made.name, json=made.json, vocabulary=made.vocabulary)
    assert [*tokenized_by(tokens)] == ["tokenizer: characters, 2 tokens"]
    tokens.tokenizer, tokens.json = ByteTokenizer.name, ByteTokenizer.json
    assert not [*tokenized_by(tokens)]


def mixed(*names, validation=None):
    return Config(data=DataConfig(path=names, validation=validation))


def of_mixture(config, run):
    tokens = open_texts(config.data.paths(), config.data.ratio())
    return recorded(described(tokens), config, run)


def test_each_text_of_a_mixture_is_recorded_and_found_next_to_the_run(here):
    (here / "project").mkdir()
    for name in ("one.txt", "two.txt"):
        (here / name).rename(here / "project" / name)
    config = located(mixed("project/one.txt", "project/two.txt"))
    texts = of_mixture(config, here / "project" / "run")
    assert [*texts] == ["data.path[0]", "data.path[1]"]
    assert texts["data.path[1]"] == {
        "tokens": 151,
        "sha256": open_tokens("project/two.txt").sha256,
        "path": str(here / "project" / "two.txt"),
        "from_run": "../two.txt",
    }
    (here / "project").rename(here / "moved")
    found = located(config, here / "moved" / "run", texts)
    assert found.data.path == (str(here / "moved" / "one.txt"), str(here / "moved" / "two.txt"))


def test_added_and_removed_texts_of_a_mixture_are_reported(here):
    old, new = mixed("one.txt", "two.txt"), mixed("three.txt", "one.txt")
    before, now = (of_mixture(config, here / "run") for config in (old, new))
    assert [*differences(before, before, old)] == []
    added, removed = differences(before, now, new)
    assert added.startswith("data.path[0]: three.txt is new") and removed.endswith("two.txt")
    turned = mixed("two.txt", "one.txt")
    assert [*differences(before, of_mixture(turned, here / "run"), turned)] == []
    (line,) = differences(of_run(configured(), here / "run"), before, old)
    assert line.startswith("data.path[1]: two.txt is new")
    held = mixed("three.txt", "one.txt", validation=0.1)
    with pytest.raises(ValueError, match=r"\Adata\.path\[0\]: three\.txt .*restore two\.txt, or"):
        [*differences(before, now, held)]


def test_changed_held_out_text_of_a_mixture_is_reported(here):
    """Texts are added and removed, also from a single text, and the list is reordered."""
    lists = [("one.txt",), ("one.txt", "two.txt"), ("two.txt", "one.txt")]
    for old, new in permutations(lists, 2):
        config = mixed(*new, validation=0.1)
        texts = [of_mixture(mixed(*names), here / "run") for names in (old, new)]
        *_, line = differences(*texts, config)
        assert line.startswith("data.validation = 0.1: the list in data.path has changed")
        assert [*differences(texts[1], texts[1], config)] == []
        others = [*differences(*texts, mixed(*new))]
        assert not any("best evaluation loss" in each for each in others)


def test_position_counts_the_sequences_of_a_single_text(here):
    texts = of_run(configured(), here / "run")
    digest, position = texts["data.path"]["sha256"], {"sequences": 12}
    expected = {"sequences": 12, f"sequences of {digest}": 12}
    assert used_by_text({"texts": texts, "position": position}) == expected
    assert used_by_text({"position": position}) == position
