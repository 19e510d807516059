"""Times whole training steps of small GPTs, and compares their losses.

    python benchmarks/training_step.py --model all --output benchmarks/results/h200_training_step.json
    python benchmarks/training_step.py --losses 200 --model "d2048 16k" --output benchmarks/results/h200_losses.json
    python benchmarks/training_step.py --distributed ddp --processes 2 --model "d1024 1k"

Each way of attention (``default``: PyTorch's function; ``enable``: the same after `bwdtune.enable`; ``attention``:
`bwdtune.attention`) runs in a process of its own, since `enable` and compiled graphs stay with a process; the ways take
turns, and the medians of all their rounds are reported. Each step is forward, backward and a fused AdamW, of bf16
weights, eager, compiled, or replayed from a CUDA graph. Without a GPU a model of a few kilobytes runs on the CPU: a
smoke test of this script.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WAYS = ("default", "enable", "attention")
MODES = ("eager", "compiled", "graph")


@dataclass(frozen=True)
class Shape:
    """A model and its batch."""

    layers: int
    width: int
    heads: int
    heads_kv: int
    batch: int
    length: int
    vocabulary: int = 8192


MODELS = {
    "d1024 1k": Shape(6, 1024, 8, 8, 8, 1024),
    "d2048 8k": Shape(4, 2048, 16, 16, 2, 8192),
    "d4096 4k grouped": Shape(2, 4096, 32, 8, 4, 4096),
    "d2048 16k": Shape(2, 2048, 16, 16, 1, 16384),
    "tiny": Shape(1, 64, 2, 1, 2, 32, 128),
}


class Block(nn.Module):
    """A layer: attention and an MLP, each before a sum."""

    def __init__(self, shape: Shape, attention: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.heads, self.heads_kv, self.attention = shape.heads, shape.heads_kv, attention
        self.head_dim = shape.width // shape.heads
        self.before_attention, self.before_mlp = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.qkv = nn.Linear(shape.width, (shape.heads + 2 * shape.heads_kv) * self.head_dim, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.up, self.down = (
            nn.Linear(shape.width, 4 * shape.width, bias=False),
            nn.Linear(4 * shape.width, shape.width, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projected = self.qkv(self.before_attention(x)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = projected.split([self.heads, self.heads_kv, self.heads_kv], 1)
        seen = self.attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.heads_kv)
        x = x + self.out(seen.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.before_mlp(x))))


class Gpt(nn.Module):
    """A decoder without positions, which change nothing about its speed."""

    def __init__(self, shape: Shape, attention: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape, attention) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


class Training:
    """One model in one process, step by step."""

    def __init__(self, shape: Shape, way: str, mode: str, distributed: str | None, device: torch.device) -> None:
        self.shape, self.device, self.mode = shape, device, mode
        torch.manual_seed(0)
        model: Any = Gpt(shape, _attention(way)).to(device, torch.bfloat16)
        if distributed == "ddp":
            model = nn.parallel.DistributedDataParallel(
                model, device_ids=[device.index] if device.type == "cuda" else None
            )
        elif distributed == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
        fused = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=fused, capturable=fused)
        self.model = torch.compile(model) if mode == "compiled" else model
        rank = int(os.environ.get("RANK", "0"))
        self.generator = torch.Generator().manual_seed(rank)
        # A part of the vocabulary, so that there is something to learn.
        self.tokens = torch.empty(shape.batch, shape.length + 1, dtype=torch.long, device=device)
        self.draw()
        self.step = self._captured() if mode == "graph" else self._step

    def draw(self) -> None:
        """Another batch: tokens that repeat with a period, so that attention has something to learn."""
        period = max(2, self.shape.length // 4)
        pattern = torch.randint(0, self.shape.vocabulary, (self.shape.batch, period), generator=self.generator)
        repeats = -(-(self.shape.length + 1) // period)
        self.tokens.copy_(pattern.repeat(1, repeats)[:, : self.shape.length + 1])

    def _step(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss: torch.Tensor = self.model(self.tokens[:, :-1], self.tokens[:, 1:])
        loss.backward()
        self.optimizer.step()
        return loss

    def _captured(self) -> Callable[[], torch.Tensor]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            loss = self._step()

        def replay() -> torch.Tensor:
            graph.replay()
            return loss

        return replay


def _attention(way: str) -> Callable[..., torch.Tensor]:
    if way == "default":
        return F.scaled_dot_product_attention
    import bwdtune

    # No step is to have another kernel than the next one.
    os.environ.setdefault("BWDTUNE_ON_MISS", "wait")
    if way == "attention":
        return bwdtune.attention
    bwdtune.enable()
    return F.scaled_dot_product_attention


def measure(training: Training, steps: int) -> dict[str, Any]:
    """Milliseconds of each step, after as many unmeasured ones."""
    for _ in range(max(3, steps // 2)):
        training.step()
    times = []
    for _ in range(steps):
        if training.device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            training.step()
            end.record()
            times.append((start, end))
        else:
            begin = time.perf_counter()
            training.step()
            times.append((begin, time.perf_counter()))
    if training.device.type == "cuda":
        torch.cuda.synchronize()
        return {"ms": [start.elapsed_time(end) for start, end in times]}
    return {"ms": [(end - begin) * 1e3 for begin, end in times]}


def curve(training: Training, steps: int) -> dict[str, Any]:
    """The loss of each step, each of another batch."""
    losses = []
    for _ in range(steps):
        training.draw()
        losses.append(training.step().detach().clone())
    return {"losses": [float(loss) for loss in losses]}


def work(arguments: argparse.Namespace) -> None:
    """One way, in this process; the result goes to a file."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    with _process_group(arguments.distributed, device):
        training = Training(MODELS[arguments.model], arguments.way, arguments.mode, arguments.distributed, device)
        begin = time.perf_counter()
        training.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        result: dict[str, Any] = {"first_step_s": time.perf_counter() - begin}
        result.update(curve(training, arguments.losses) if arguments.losses else measure(training, arguments.steps))
        result["environment"] = _environment(device)
        if arguments.way != "default":
            import bwdtune

            result["stats"] = json.loads(json.dumps(bwdtune.stats(), default=_plain))
        if int(os.environ.get("RANK", "0")) == 0:
            Path(arguments.result).write_text(json.dumps(result))


def _plain(value: Any) -> Any:
    return asdict(value) if hasattr(value, "__dataclass_fields__") else str(value)


@contextlib.contextmanager
def _process_group(distributed: str | None, device: torch.device) -> Iterator[None]:
    if not distributed:
        yield
        return
    import torch.distributed as dist

    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def _environment(device: torch.device) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
    cudnn = torch.backends.cudnn.version() if device.type == "cuda" else None
    return {"gpu": gpu, "torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": cudnn}


def run(arguments: argparse.Namespace, model: str, mode: str, way: str) -> dict[str, Any]:
    """One way in a process of its own, or in one for each GPU.

    Raises:
        SystemExit: It failed; what it said stands above.
    """
    python = [sys.executable]
    if arguments.distributed:
        python += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.processes}"]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        options = {"model": model, "mode": mode, "way": way, "steps": arguments.steps, "losses": arguments.losses}
        command = [*python, __file__, "--worker", f"--result={result}"]
        command += [f"--{name}={value}" for name, value in options.items()]
        command += [f"--distributed={arguments.distributed}"] if arguments.distributed else []
        status = subprocess.run(command).returncode
        if status:
            raise SystemExit(f"{shlex.join(command)} failed: exit status {status}")
        answer: dict[str, Any] = json.loads(result.read_text())
        return answer


def times(arguments: argparse.Namespace, models: list[str]) -> list[dict[str, Any]]:
    """A row for each model and mode: milliseconds by way, and how many times as fast as the default."""
    rows = []
    for model in models:
        for mode in arguments.modes:
            found: dict[str, list[float]] = {way: [] for way in arguments.ways}
            first: dict[str, float] = {}
            launches: dict[str, Any] = {}
            for _ in range(arguments.rounds):
                for way in arguments.ways:
                    result = run(arguments, model, mode, way)
                    found[way] += result["ms"]
                    first.setdefault(way, result["first_step_s"])
                    launches[way] = result.get("stats")
                    environment = result["environment"]
            medians = {way: statistics.median(each) for way, each in found.items()}
            row = {"model": model, **asdict(MODELS[model]), "mode": mode, "ms": medians, "first_step_s": first}
            if "default" in medians:
                row["times_as_fast"] = {way: medians["default"] / ms for way, ms in medians.items()}
            rows.append({**row, "stats": launches, "environment": environment})
            print(f"{model:18} {mode:9}", *(f"{way} {ms:.3f} ms" for way, ms in medians.items()), file=sys.stderr)
    return rows


def losses(arguments: argparse.Namespace, models: list[str]) -> list[dict[str, Any]]:
    """A row for each model: curves of every way, and how far apart they are.

    ``noise`` has for each of PyTorch's own runs the largest distance of a loss from the nearest other run of PyTorch's;
    ``distance`` the same for each run of another way.
    """
    rows = []
    for model in models:
        runs = {
            way: [run(arguments, model, arguments.modes[0], way) for _ in range(max(2, arguments.rounds))]
            for way in ("default", *(way for way in arguments.ways if way != "default"))
        }
        curves = {way: [result["losses"] for result in results] for way, results in runs.items()}

        def apart(curve: list[float], others: list[list[float]]) -> float:
            return min(max(abs(one - two) for one, two in zip(curve, other, strict=True)) for other in others)

        default = curves["default"]
        noise = [apart(curve, default[:index] + default[index + 1 :]) for index, curve in enumerate(default)]
        distances = {way: [apart(curve, default) for curve in curves[way]] for way in curves if way != "default"}
        rows.append(
            {
                "model": model,
                "noise": noise,
                "distance": distances,
                "losses": curves,
                "environment": runs["default"][0]["environment"],
            }
        )
        print(f"{model:18} noise {noise}", distances, file=sys.stderr)
    return rows


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--model", default="all" if on_gpu else "tiny", help=f"all, or one of {', '.join(MODELS)}")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES if on_gpu else ["eager"]))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, default=20 if on_gpu else 2, help="measured steps of a process")
    parser.add_argument(
        "--rounds", type=int, default=3 if on_gpu else 1, help="processes of each way; losses take two at least"
    )
    parser.add_argument("--losses", type=int, default=0, help="compare the losses of so many steps instead of times")
    parser.add_argument("--distributed", choices=("ddp", "fsdp2"), help="one process a GPU, by torchrun")
    parser.add_argument("--processes", type=int, default=2, help="with --distributed")
    parser.add_argument("--output", type=Path, help="a JSON file; else it is printed")
    for hidden in ("--mode", "--way", "--result"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(given)


def main() -> None:
    """Runs all that is asked for, and writes one JSON object."""
    arguments = parse()
    if arguments.worker:
        work(arguments)
        return
    models = [name for name in MODELS if name != "tiny"] if arguments.model == "all" else [arguments.model]
    rows = losses(arguments, models) if arguments.losses else times(arguments, models)
    report = {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "distributed": arguments.distributed,
        "processes": arguments.processes if arguments.distributed else 1,
        "rows": rows,
    }
    text = json.dumps(report, indent=1)
    if arguments.output:
        arguments.output.write_text(f"{text}\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
