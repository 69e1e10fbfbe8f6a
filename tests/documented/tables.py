"""Documented commands that tests/test_documented_commands.py does not run, and shorter forms of
others. Patterns are searched in "PAGE COMMAND"; the first match is used."""

from importlib.util import find_spec

GPU = "tests/simulated_cuda, tests/gpu and tests/cuda; wants GPUs"
CLUSTER = "tests/test_packaging.py reads the recipe; wants a program that is not here"
STUDY = "takes minutes: "

# Where a command is run, or why it is not.
ELSEWHERE = {
    r" make (setup|lint|docs|test|test-slow|fuzz|slurm-test|test-hosts)(?![-\w])": ".ci/run",
    r" make test-profile": STUDY + "tests/test_profile.py",
    r" make train$": "sets up .venv; then runs `hpc3d.train gpt-3d-64` on 64 ranks, as README.md",
    r" make test-mpi": "make test-slow runs it; LAUNCH is for a cluster's launcher",
    r" make gpu-check| python -m tests\.gpu ": "tests/gpu/test_check.py; wants a GPU",
    r"docs/gpu\.md .*hpc3d\.train|train llama-3-8b |partition run .*backend cupy": GPU,
    r" source \.venv": ".ci/run, by make",
    r" (python -m )?pip (install|wheel)": "tests/test_wheel.py",
    r" (LAUNCH=\S+ )?sbatch ": "tests/slurm",
    r" --hostfile ": "tests/hosts",
    r" (apptainer|docker|spack|rattler-build|conda) | export APPTAINERENV_": CLUSTER,
    r" h5(ls|dump) ": "programs of HDF5; tests/trace/test_file.py reads what they show",
    r"README.*hpc3d\.checkpoint \w+ \.\.\.$": "docs/reliability.md and hugging-face.md",
    r"docs/models\.md .*\.train llama-3d-64$": "README.md",
    r"docs/(choose-layout|questions)\.md .*\.plan gpt-3d-64 --ranks 64$": "README.md",
    r"-np 64 .*train (best|planned|continued)\.toml --resume ": "tests/test_plan.py",
    r"docs/train-experts\.md .*train moe-switch-64$": "README.md",
    r"docs/fit-memory\.md .*--memory (8\.5|7)MB$|hpc3d\.plan gshard-600b ": "tests/test_plan.py",
    r"docs/parallelism\.md .* gpt-4d-64 ": "README.md",
    r"docs/long-sequences\.md .*train long-context-16$": "README.md",
    r" python -m hpc3d\.bench (published|partition)": STUDY + "tests/studies",
    r"README.*hpc3d\.sweep ": "docs/sweep.md",
    r"-study\.md .*bench calibrate$": STUDY + "tests/predict/calibration/test_calibrate.py",
    r"docs/hosts-study\.md .*hosts\.steps ": STUDY + "tests/hosts trains on emulated hosts",
    r"docs/local-updates-study\.md ": STUDY + "tests/training/optimizers/test_outer.py",
    r" python -m hpc3d\.bench planners": STUDY + "tests/test_planned_runs.py",
    r" python -m hpc3d\.bench peers": STUDY + "tests/test_torch_peers.py",
    r"docs/data\.md .*--tokenizer gpt2$": "tests/data/test_tokenizer_files.py, without a download",
    r"docs/partition(-study)?\.md .*(:large|:resnet152_x8|partition compare|-np 8 .*) ": STUDY
    + "tests/partition/test_capture.py and baselines/",
    r"plan (switch-c|llama-3-70b|gpt2-124m-h200) ": STUDY
    + "tests/test_plan.py plans one of its kind",
    r"docs/public-models\.md ": "tests/peers/test_documented_models.py",
    r"docs/partition\.md .*PROFILE\.json": "tests/partition/profiles/test_profile_command.py",
    r" lm_eval ": "a program that is not here; downloads data",
    r" torchrun ": "tests/partition/execution/test_torchrun_file.py",
    r"jobs/README\.md bash -n .*shellcheck ": "tests/slurm/test_scripts.py",
}

# How a command is made shorter: by ranks in the place of those of -np, and words at its end.
PLANE = "-np 4 --mesh.x 2 --mesh.y 1 --mesh.z 2"
SHORT = "--train.steps 2 --train.batch 24"
SAVED = "--train.steps 2 --checkpoint.every 2"
EXPERTS = f"-np 4 --mesh.e 2 --mesh.x 2 --mesh.y 1 --mesh.z 1 {SHORT}"
REDUCED = {
    r"README.*hpc3d\.train --launch 64$": "--train.steps 1",  # the only one on 64 ranks
    r"train gpt-4d-64( |$)(?!--dry)": "-np 4 --mesh.p 2 --mesh.x 1 --mesh.y 1 --mesh.z 1 "
    "--train.steps 2 --train.batch 32",
    r"train (llama-3d|bert)-64": f"{PLANE} {SHORT}",
    r"train gpt-3d-64 --data.validation": f"{PLANE} {SHORT} --train.eval_every 1 "
    "--data.validation 0.01",
    r"reports\.md .*train gpt-3d-8 ": "--train.steps 2 --train.batch 16",
    r"evaluation\.md .*web\.txt": f"{SHORT} --train.eval_every 1",
    r"train gpt-3d-64 --checkpoint.every": f"{PLANE} {SHORT} --checkpoint.every 2",
    r"train long-context-16": "-np 4 --mesh.c 4 --model.sequence 512 --train.steps 1",
    r"train moe-(switch|llama)-64": EXPERTS,
    r"train moe-gshard-64": f"-np 4 --mesh.d 1 --mesh.e 2 --mesh.x 1 --mesh.z 1 {SHORT}",
    r"train moe-text": f"{SAVED} --data.validation 0.005",
    r"train gpt-text": SAVED,
    r"train gpt-local": f"{SHORT} --train.eval_every 1 --data.validation 0.005",
    r"train --resume \S+( --launch 8$| --train.steps 40|$)": "-np 6 --train.steps 4",
    r"data\.md .*train --resume ": f"-np 2 --mesh.d 2 --train.batch 8 {SAVED}",
    r"--model.vocabulary 50304": "-np 2 --mesh.y 1 --mesh.z 1 --train.steps 1 --train.batch 2",
    r"--model.vocabulary 8192": f"{PLANE} {SHORT}",
    r"models\.md .*hpc3d\.train ": f"-np 4 {SHORT}",
    r"(data|parallelism|long-sequences|fit-memory)\.md .*hpc3d[. ]train ": SHORT,
    r"partition run .*--resume": "--steps 4",
    r"partition run .*--checkpoint": "--steps 2 --checkpoint.every 2",
    r"partition run ": "--steps 3",
    r"prepare (my|part|train)-": "--force",  # each is an example by itself
    r"generate ": "--tokens 20",
    r"bench scaling .*--measure ": "--ranks 1,8 --rounds 1 --model.hidden 96 --train.batch 48",
    r"README.*hpc3d\.evaluate ": "--batches 2",
    r"watching\.md .*hpc3d\.watch": "--once",
    r"questions\.md .*hpc3d\.train gpt-serial": "--train.steps 2",
    r"sweep\.md .*hpc3d\.sweep ": "--sweep.train.optimizer muon --sweep.seed 1 --train.steps 9",
    r"--name killed": "--checkpoint.every 2",
    r"--name tour": "--train.steps 10",
    r"--resume \$RUN --train.steps 60": "--train.steps 12",
    r"--name \$scheme": "--train.steps 3",
    r"--train.max_minutes": "--train.max_minutes 0.02",
}

# Texts of a page by what they stand in for.
SETTINGS = {
    "README.md": {"TEXT...": "inputs/corpus", "held-out.txt": "inputs/corpus"},
    "docs/data.md": {"results/RUN": "results/gpt-text-..."},
    "docs/evaluate.md": {"FOLDER": "theirs"},
    "docs/generation.md": {"FOLDER": "exported"},
    "docs/partition.md": {"results/module-STAMP": "results/module-..."},
    "docs/prediction.md": {"RUN_DIR": "results/RUN", "machine M": "machine h100"},
    "docs/reports.md": {} if find_spec("otf2") else {",otf2": ""},
    "docs/gpu-verification.md": {"results/gpu-machine.toml": "h100"},
    "docs/hugging-face.md": {"TEXT": "inputs/corpus"},
    "docs/techniques.md": {
        "INPUT.toml": "gpt-1.3b-8gpu",
        "ranks N": "ranks 8",
        "[": "",
        "NAME]": "h100",
    },
    "docs/troubleshooting.md": {"np N": "np 2"},
}
EXPECTED = {r"--train\.max_minutes": 75}  # stopped early, and all is saved

# What a page shows of the output of its commands: fits the page, and what they print here.
SHOWN = {
    "docs/evaluate.md": [
        r"file +loss +perplexity +bits/byte +accuracy +tokens +tokens/s\n"
        r"held-out\.txt +[\d.]+ +[\d.,]+ +[\d.]+ +[\d.]+% +2,280 +[\d,]+\nother\.txt .* 6,840 ",
    ],
    "docs/evaluation.md": [
        r"evaluation of code\.txt: loss [\d.]+, perplexity [\d.]+, accuracy",
        r"evaluation after step \d+: mean loss [\d.]+, perplexity [\d.]+, accuracy",
        r"evaluation after step \d+: loss [\d.]+, perplexity [\d.]+, accuracy [\d.]+ %; "
        r"\d+ tokens in [\d.]+ s, the best so far",
    ],
    "docs/partition.md": [
        r"4 stages, \d+ microbatch(es)?, schedule \S+\nstep time ",
        r"boundary  message \[MB\]  last node; step time at the next-best location",
    ],
    "docs/questions.md": [
        r"memory: peak of 21\.1 GB on the rank that needs the most, 169 GB on all ranks; fits .*",
        r"5\.4906?\d* ",
    ],
    "docs/techniques.md": [
        r"8 ranks of h100; each row changes one key of \S+:\n.*microbatches=",
        r"change +memory +received +step\n *as it is +[\d.,]+ MB +[\d.,]+ MB +[\d.,]+ m?s\n",
    ],
    "docs/watching.md": [
        r"loss [\d.]+, initially [\d.]+",
        r"[\d,]+ tokens/s, \S+ m?s per step, communication [\d.]+%,?\s+peak memory per rank up to "
        r"[\d,.]+ MB",
        r"steps? \d+.*, mean of \d+ ranks\n *axis +in calls +waiting\n",
    ],
}
