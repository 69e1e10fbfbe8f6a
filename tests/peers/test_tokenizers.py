"""Tokenizers exchanged between Hugging Face transformers, tiktoken and hpc3d."""

import base64
import json

import numpy as np
import pytest
import torch

from hpc3d import prepare
from hpc3d.checkpoint import main
from hpc3d.data.token_file import TokenFile
from hpc3d.data.tokenizer import BpeTokenizer, ByteTokenizer, train_bpe
from hpc3d.data.tokenizer_files import tokenizer_from
from tests.mpi import checked
from tests.runs import losses, newest

transformers = pytest.importorskip("transformers", reason="make test-peers installs it")

pytestmark = pytest.mark.slow

TEXT = "The cat sat on the mat; it's 12,345 größer\n\n  the dog's log.  <|end|> 東京 ❤️\t\n" * 9
GPT2 = {"n_layer": 2, "n_embd": 48, "n_head": 8, "n_positions": 16, "vocab_size": 304}
GPT2 |= {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}


def command(*words):
    assert main([str(word) for word in words]) == 0


@pytest.fixture(scope="module")
def fast():
    """Tokenizer of transformers with an unusual end token."""
    rules = train_bpe([TEXT.encode()], 299).json.replace("<|end|>", "<|over|>")
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=BpeTokenizer(rules)._tokenizer,
        eos_token="<|over|>",
        bos_token="<|begin|>",
    )
    return made


def test_imported_model_trains_and_exports_with_its_tokenizer(tmp_path, fast):
    """Uses 8 ranks; the exported tokenizer gives the tokens that the run was trained on."""
    theirs, run, out = (tmp_path / name for name in ("theirs", "run", "out"))
    torch.manual_seed(4)
    config = transformers.AutoConfig.for_model("gpt2", **GPT2)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(theirs)
    fast.save_pretrained(theirs)
    command("import", theirs, "-o", run)
    lines = [json.dumps({"text": TEXT}), json.dumps({"text": "the dog"})]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines) + "\n")
    tokens = tmp_path / "mine.h5"
    words = [tmp_path / "mine.jsonl", "-o", tokens, "--tokenizer", run]
    assert prepare.main([str(word) for word in words]) == 0
    how = ["--train.steps", 2, "--train.batch", 8, "--checkpoint.every", 2, "--mesh.d", 8]
    checked(8, "-m", "hpc3d.train", "--resume", run, "--data.path", tokens, *how)
    assert len(losses(run)) == 2
    command("export", run, "-o", out)
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert type(tokenizer) is type(transformers.AutoTokenizer.from_pretrained(theirs))
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|over|>", "<|begin|>")
    assert model.config.eos_token_id == tokenizer.eos_token_id == 0
    assert model.config.bos_token_id == tokenizer.bos_token_id
    with TokenFile(tokens) as made:
        ids = made.read(0, len(made)).tolist()
    expected = [tokenizer.encode(text) for text in (TEXT, "the dog")]
    assert ids == [*expected[0], 0, *expected[1], 0]
    text = "the<|begin|> d<|over|>"  # with special tokens
    printed = checked(
        1, "-m", "hpc3d.generate", run, "--prompt", text, "--tokens", 5, "--temperature", 0,
        "--json",
    )  # fmt: skip
    (sample,) = json.loads(printed.splitlines()[-1])["samples"]
    prompt = torch.tensor([tokenizer.encode(text)])
    assert {tokenizer.bos_token_id, tokenizer.eos_token_id} < {*prompt[0].tolist()}
    how = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    given = model.generate(prompt, attention_mask=torch.ones_like(prompt), **how)
    assert sample["tokens"] == given[0, prompt.shape[1] :].tolist()[: len(sample["tokens"])]


@pytest.mark.parametrize("name", ["byte", "bpe"])
def test_transformers_reads_the_exported_tokenizer(tmp_path, name):
    (tmp_path / "a.txt").write_text(TEXT)
    made = [str(tmp_path / "a.txt"), "-o", str(tmp_path / "a.h5"), "--tokenizer", name]
    assert prepare.main(made) == 0
    small = "--model.layers 1 --model.hidden 32 --model.heads 2 --train.batch 4 --train.steps 1"
    words = [*small.split(), "--model.sequence", 16, "--checkpoint.every", 1]
    where = ["--data.path", tmp_path / "a.h5", "--run.out", tmp_path / "results"]
    checked(1, "-m", "hpc3d.train", *words, *where)
    command("export", newest(tmp_path / "results"), "-o", tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    with TokenFile(tmp_path / "a.h5") as tokens:
        ids = tokens.read(0, len(tokens)).tolist()
    without = TEXT.replace("<|end|>", "")  # which they take for the token, and we for text
    assert tokenizer.eos_token_id == ids[-1] == 0
    assert tokenizer.decode(ids[:-1]) == TEXT
    expected = ByteTokenizer() if name == "byte" else tokenizer_from(str(tmp_path / "out"))
    assert tokenizer.encode(without) == expected.encode(without.encode()).tolist()


def test_tiktoken_ranks_encode_as_tiktoken(tmp_path):
    """The vocabulary is learned here, and text is split as in GPT-2."""
    tiktoken = pytest.importorskip("tiktoken")
    model = json.loads(train_bpe([TEXT.encode()], 330).json)["model"]
    letters = {letter: byte for byte, letter in tiktoken_letters().items()}
    ranks = {
        bytes(letters[letter] for letter in token): number - 1
        for token, number in model["vocab"].items()
        if number
    }
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    (tmp_path / "own.tiktoken").write_text("\n".join(lines) + "\n")
    from tiktoken_ext.openai_public import r50k_pat_str

    end = {"<|endoftext|>": len(ranks)}
    theirs = tiktoken.Encoding(
        "own", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=end
    )
    ours = tokenizer_from(str(tmp_path / "own.tiktoken"))
    assert (ours.end, ours.vocabulary) == (theirs.eot_token, theirs.n_vocab)
    chance = np.random.default_rng(5)
    words = TEXT.split(" ")
    for size in range(1, 60):
        text = " ".join(chance.choice(words, size))
        assert ours.encode(text.encode()).tolist() == theirs.encode_ordinary(text)
        assert ours.decode(ours.encode(text.encode())).decode() == text


def tiktoken_letters():
    """Return the character of each byte in GPT-2's vocabulary, as in transformers."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return bytes_to_unicode()
