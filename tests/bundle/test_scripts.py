"""What is known of a training script from its source; and that nothing is said where something is not known."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotfleet.bundle import scripts
from spotfleet.bundle.scripts import horovod_advice, kind_of, launched, launcher_hint, read, remarks

ELASTIC = """
import torch
import spotfleet.train as hvd

hvd.init()

@hvd.elastic.run
def train(state):
    pass
"""
WITHOUT = """
import torch
import spotfleet.train as hvd

hvd.init()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([torch.zeros(1)], 0.1))
model.eval()
"""
PLAIN = "import torch\nfrom torch import nn\nimport os, sys\nmodel = nn.Linear(1, 1)\nnn.init.zeros_(model.weight)\n"
HINT = scripts.ELASTIC_HINT


def said(tmp_path: Path, source: str, workers: int = 4, beside: dict[str, str] | None = None) -> list[str]:
    for name, text in (beside or {}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "train.py").write_text(source)
    return remarks(read(tmp_path / "train.py"), workers)


def test_an_elastic_script_gets_no_remark(tmp_path):
    assert said(tmp_path, ELASTIC) == []


LOSS = ("train.py: it calls hvd.init() and has no hvd.elastic.run: at each change of hosts all workers start anew, "
        f"from a checkpoint of its own; hint: {HINT}")


@pytest.mark.parametrize("source", [
    WITHOUT,
    "import spotfleet.train\nspotfleet.train.init()\nspotfleet.train.allreduce(x)\n",
    "from spotfleet import train as engine\nengine.init()\nengine.DistributedOptimizer(o)\n",
    "from spotfleet.train import DistributedOptimizer, init\ninit()\n",
])
def test_a_script_with_init_and_without_elastic_run_is_told_that_all_start_anew(tmp_path, source):
    assert said(tmp_path, source) == [LOSS] == said(tmp_path, source, workers=1)


def test_a_script_with_init_whose_workers_share_nothing_is_told_that_each_trains_alone(tmp_path):
    source = "import torch\nimport spotfleet.train as hvd\nhvd.init()\n"
    (line,) = said(tmp_path, source)
    assert line.startswith("train.py: it calls hvd.init() and has neither hvd.DistributedOptimizer nor "
                           "hvd.elastic.run: each of up to 4 workers trains alone; hint: ")
    assert said(tmp_path, source, workers=1) == []


def test_a_script_without_spotfleet_is_told_that_each_worker_runs_all_of_it(tmp_path):
    assert said(tmp_path, PLAIN) == ["train.py: it does not import spotfleet.train: each of up to 4 workers runs all "
                                     f"of it alone; hint: --np 1, or {HINT}"]
    assert said(tmp_path, PLAIN, workers=1) == []


def test_a_script_that_imports_spotfleet_and_never_calls_init_is_told_the_same(tmp_path):
    (line,) = said(tmp_path, "import spotfleet.train as hvd\nprint(hvd.Average)\n")
    assert line.startswith("train.py: it calls no hvd.init(): each of up to 4 workers")


def test_modules_beside_the_script_are_read_too(tmp_path):
    loop = "import spotfleet.train as hvd\n@hvd.elastic.run\ndef train(state): pass\n"
    script = "import spotfleet.train as hvd\nfrom parts.loop import train\nhvd.init()\nhvd.allreduce(x)\n"
    assert said(tmp_path, script, beside={"parts/__init__.py": "", "parts/loop.py": loop}) == []
    assert said(tmp_path, script, beside={"parts/loop.py": "def train(state): pass\n"}) == [LOSS]


def test_relative_imports_and_submodules_are_followed(tmp_path):
    script = "import spotfleet.train as hvd\nfrom parts import loop\nhvd.init()\nhvd.allreduce(x)\n"
    other = "import spotfleet.train as hvd\ngo = hvd.elastic.run\n"
    files = {"parts/__init__.py": "", "parts/loop.py": "from .other import go\n", "parts/other.py": other}
    assert said(tmp_path, script, beside=files) == []
    assert said(tmp_path, script, beside={**files, "parts/loop.py": ""}) == [LOSS]


@pytest.mark.parametrize("unsure", [
    "import company_trainer", "from company.trainer import fit", "import importlib", "exec(open('x').read())",
    "import subprocess", "import os\nos.system('python other.py')", "import torch.multiprocessing as mp",
    "run = getattr(hvd, 'elastic').run", "go = 'elastic.run'", "from parts import missing_package_file.x",
    "def broken(:", "import multiprocessing", "from spotfleet.train import *",
])
@pytest.mark.parametrize("source", [WITHOUT, PLAIN])
def test_nothing_is_said_of_a_script_that_may_run_other_code(tmp_path, source, unsure):
    if "elastic" in unsure and source is PLAIN:
        unsure = "import company_trainer"
    assert said(tmp_path, f"{source}\n{unsure}\n") == []


def test_a_module_beside_the_script_that_cannot_be_read_silences_it(tmp_path):
    assert said(tmp_path, f"{PLAIN}import other\n", beside={"other.py": "def broken(:"}) == []
    assert said(tmp_path, f"{PLAIN}import other\n", beside={"other.py": "import company_trainer\n"}) == []


def test_a_script_is_never_run(tmp_path):
    assert len(said(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit\nimport torch\n")) == 1
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("line", "instead"), [
    ("import horovod.torch as hvd", "write `import spotfleet.train as hvd` instead of `import horovod.torch as hvd`"),
    ("from horovod import torch as hvd",
     "write `from spotfleet import train as hvd` instead of `from horovod import torch as hvd`"),
    ("from horovod.torch.elastic import run",
     "write `from spotfleet.train.elastic import run` instead of `from horovod.torch.elastic import run`"),
    ("import horovod", "remove `import horovod`: the script runs under spotfleet.train"),
    ("import horovod.tensorflow as hvd",
     "`import horovod.tensorflow as hvd` has no counterpart: spotfleet.train stands for horovod.torch"),
])
def test_an_import_of_horovod_names_the_line_to_change(tmp_path, line, instead):
    assert said(tmp_path, f"import torch\n{line}\nhvd.init()\n") == [
        f"train.py: it imports Horovod, in whose place hosts have spotfleet.train; hint: line 2 of train.py: {instead}"]
    error = (f'Traceback (most recent call last):\n  File "/w/train.py", line 2, in <module>\n    {line}\n'
             "ModuleNotFoundError: No module named 'horovod'\n")
    assert horovod_advice(error) == f"line 2 of train.py: {instead}"


def test_a_guarded_import_of_horovod_gets_no_remark(tmp_path):
    assert said(tmp_path, "try:\n    import horovod.torch as hvd\nexcept ImportError:\n    hvd = None\n") == []


def test_other_errors_name_no_line():
    assert horovod_advice("ModuleNotFoundError: No module named 'timm'") == ""
    assert horovod_advice("ValueError: No module named 'horovod'") == ""


def test_a_script_that_is_to_run_alone_on_each_worker_gets_no_remark_that_it_does(tmp_path):
    (tmp_path / "train.py").write_text(PLAIN)
    assert remarks(read(tmp_path / "train.py"), 4) and not remarks(read(tmp_path / "train.py"), 4, "command")


def test_a_module_that_the_hosts_lack_is_named_with_the_way_to_get_it():
    raised = "Traceback ...\nModuleNotFoundError: No module named 'accelerate.utils'\n"
    assert "no module accelerate: " in scripts.module_advice(raised)
    assert "`setup: pip install PACKAGE`" in scripts.module_advice(raised)
    for output in ("No module named 'x'\n", "ModuleNotFoundError: No module named 'horovod.torch'\n", ""):
        assert scripts.module_advice(output) == ""


def test_the_examples_get_no_remark():
    examples = Path(__file__).parents[2] / "examples"
    assert [remarks(read(examples / name), 4) for name in ("digits.py", "gpt.py")] == [[], []]


def lost(tmp_path: Path, source: str, *, together: bool = False) -> str:
    (tmp_path / "train.py").write_text(source)
    return scripts.uncollected(read(tmp_path / "train.py"), together)


def test_a_script_whose_files_stay_on_its_host_is_named_with_the_folder_to_use(tmp_path):
    line = lost(tmp_path, PLAIN + "torch.save(model, 'model.pt')\n")
    assert line.startswith("train.py: it saves files, and not in $SPOTFLEET_OUTPUT") and "`spotfleet down`" in line
    assert lost(tmp_path, PLAIN) == ""
    assert lost(tmp_path, PLAIN + "torch.save(model, os.environ['SPOTFLEET_OUTPUT'] + '/model.pt')\n") == ""


def test_a_script_for_torchrun_that_saves_is_sent_to_the_option_that_lets_its_files_follow_it(tmp_path):
    assert "hint: --checkpoint-dir" in lost(tmp_path, DDP + "torch.save({}, 'snapshot.pt')\n", together=True)
    assert "hint: --checkpoint-dir" in lost(tmp_path, "import lightning\nlightning.Trainer().fit()\n", together=True)
    assert lost(tmp_path, DDP, together=True) == ""


SPAWNS = """
import os
import torch.distributed as dist
import torch.multiprocessing as mp

def work(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)

mp.spawn(work, args=(2,), nprocs=2)
"""


def test_a_script_that_spawns_its_ranks_is_said_to_do_so_once_for_each_worker(tmp_path):
    [line] = said(tmp_path, SPAWNS, workers=3)
    assert "each of up to 3 workers starts its own" in line and "hint: --np 1" in line
    assert said(tmp_path, SPAWNS, workers=1) == []
    assert said(tmp_path, SPAWNS.replace('"MASTER_ADDR"', '"RANK"')) == []
    assert said(tmp_path, DDP + "import torch.multiprocessing as mp\nmp.set_start_method('spawn')\n") == []


def test_the_files_of_the_examples_are_collected():
    examples = Path(__file__).parents[2] / "examples"
    assert [scripts.uncollected(read(examples / name), False) for name in ("digits.py", "gpt.py")] == ["", ""]


@pytest.mark.parametrize("source", ["import ray\nray.init()\n", "from ray import tune\n"])
def test_a_script_for_a_ray_cluster_is_pointed_there_with_one_worker_too(tmp_path, source):
    (tmp_path / "train.py").write_text(source)
    for workers in (1, 4):
        assert remarks(read(tmp_path / "train.py"), workers) == [
            "train.py: it imports ray: `train` starts it once for each slot, each outside of the fleet's Ray cluster; "
            "hint: `spotfleet ray start`, then `spotfleet ray submit train.py`"]


DDP = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"


@pytest.mark.parametrize(("source", "kind", "gang"), [
    (ELASTIC, "elastic", False),
    (WITHOUT, "restart", False),
    (WITHOUT + "import multiprocessing\n", "restart", False),
    (WITHOUT + "import somebodys_package\n", "", False),
    (DDP, "restart", True),
    (DDP + "import somebodys_package\n", "restart", True),
    ("import os\nddp = int(os.environ.get('LOCAL_RANK', -1)) != -1\n", "restart", True),
    ("import accelerate\n", "restart", True),
    ("from lightning.pytorch import Trainer\n", "restart", True),
    (ELASTIC + DDP, "elastic", False),
    (WITHOUT + DDP, "restart", False),
    (PLAIN, "command", False),
    ("import somebodys_package\n", "", False),
])
def test_the_kind_of_job_is_found_from_the_source(tmp_path, source, kind, gang):
    (tmp_path / "train.py").write_text(source)
    found = kind_of(read(tmp_path / "train.py"))
    assert (found.kind, found.gang) == (kind, gang) and bool(found.why) == bool(kind)


def test_the_launcher_decides_over_the_source(tmp_path):
    (tmp_path / "train.py").write_text(DDP)
    facts = read(tmp_path / "train.py")
    kinds = [(found.kind, found.gang) for found in (launched(facts, "elastic"), launched(facts, "command"))]
    assert kinds == [("elastic", False), ("command", False)]
    (tmp_path / "train.py").write_text(PLAIN)
    assert launched(read(tmp_path / "train.py"), "torchrun").gang
    (tmp_path / "train.py").write_text(ELASTIC)
    assert not launched(read(tmp_path / "train.py"), "torchrun").gang  # hvd.init() finds the others


def test_a_script_for_torchrun_is_not_said_to_run_alone(tmp_path):
    assert said(tmp_path, DDP) == []


def test_a_launcher_in_the_place_of_a_script_is_answered_with_the_command_for_it():
    assert "`spotfleet run --nodes N -- torchrun ...`" in launcher_hint("torchrun")
    assert "`--np MIN:MAX`" in launcher_hint("--nproc_per_node=2") and launcher_hint("nowhere.py") == ""
