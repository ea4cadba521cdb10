"""Memory of the device and of the host: sharded models, and copies for checkpoints."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.gpu.scene import Scene
from tests.gpu.subjects import Net
from tests.gpu.worlds import Company
from tests.support.history import read_ledger

_START_S, _END_S = 90.0, 120.0
_BYTES_PER_WEIGHT = 16  # fp32: a weight, its gradient and two moments


def fsdp(scene: Scene) -> None:
    """Train a sharded model in worlds of 1 and 2, then as DDP from its checkpoint, and sharded again.

    Asserts that the peak of device memory before the first world, and at a re-form up to the restored state, is at most
    1.2 times what a rank's shard takes with gradient and moments, plus one layer; and that each change of strategy goes
    on where it was. Figures: these peaks and that of training as multiples of the shard, and the steps that each part
    went on from.
    """
    width = 8192 if scene.on_gpu else 512
    net = f"model.args={{width: {width}}}"
    with torch.device("meta"):
        num_weights = sum(parameter.numel() for parameter in Net(width=width).parameters())
    layer_bytes = 4 * width * width
    for size in (1, 2):
        company = Company(scene, ["run.steps=20", "parallel.kind=fsdp", net, "checkpoint.every=5 steps"], f"of-{size}")
        _train(scene, company, size)
        shard_bytes = _BYTES_PER_WEIGHT * num_weights / size
        for note in company.memory():
            if "peak_bytes" in note:
                moment = "start" if note["after_attempt"] == 0 else note["moment"]
                scene.figure(**{f"of_{size}_{moment}": note["peak_bytes"] / shard_bytes})
                if moment != "trained":
                    claim = f"world of {size}, {moment}: the peak is {note['peak_bytes'] / shard_bytes:.2f} shards"
                    scene.check(note["peak_bytes"] <= 1.2 * shard_bytes + layer_bytes, claim)
    _change_strategy(scene, net)


def offload(scene: Scene) -> None:
    """Train a sharded model with its state on the device, and again on the host; each in worlds of 2 that re-form once.

    Asserts that each step's loss is that of the other run, to a thousandth; that both go on from where they were; and
    that the second one's peak of device memory is at most half of what a rank's shard takes with gradient and moments.
    Figures: both peaks as multiples of that, and the largest difference of losses.
    """
    width = 4096 if scene.on_gpu else 256
    net = f"model.args={{width: {width}, num_layers: 8}}"
    with torch.device("meta"):
        num_weights = sum(parameter.numel() for parameter in Net(width=width, num_layers=8).parameters())
    shard_bytes = _BYTES_PER_WEIGHT * num_weights / 2
    losses: dict[str, list[float]] = {}
    for home, offloads in (("device", "false"), ("host", "true")):
        parallel = f"parallel={{kind: fsdp, reduce_every_microbatch: true, cpu_offload: {offloads}}}"
        company = Company(scene, ["run.steps=12", parallel, net], f"on-{home}")
        _train(scene, company, 2)
        losses[home] = [line["loss"] for line in read_ledger(company.directory.store).lines]
        scene.check(len(company.events("restore")) == 1, f"on the {home}: the second world began anew")
        for note in company.memory()[1:]:
            if "peak_bytes" in note:
                shards = note["peak_bytes"] / shard_bytes
                scene.figure(**{f"on_{home}": shards})
                if home == "host":
                    scene.check(shards <= 0.5, f"with its state on the host a rank's peak is {shards:.2f} shards")
    pairs = zip(losses["device"], losses["host"], strict=True)
    difference = max(abs(ours / theirs - 1) for ours, theirs in pairs)
    scene.figure(losses_differ=difference)
    scene.check(difference <= 1e-3, f"losses differ by {difference:.1e}")


def _train(scene: Scene, company: Company, size: int) -> None:
    """Train in a world that re-forms once."""
    with company.ranks as ranks:
        company.start(*range(size))
        company.form(list(range(size)))
        if not company.wait_for_step(6, _START_S):
            scene.check(False, f"a world of {size} took no steps: {ranks.last_words(0)}")
            return
        company.resize()
        company.form(list(range(size)))
        codes = ranks.wait(_END_S)
    ranks.check_ended(codes, what=f"world of {size}: member")


def _trained(scene: Scene, overrides: list[str], name: str) -> Company:
    """Have one process train to the end of its run."""
    company = Company(scene, overrides, name)
    company.train(1, _START_S + _END_S)
    return company


def _change_strategy(scene: Scene, net: str) -> None:
    sources = []
    for part, kind in enumerate(("fsdp", "ddp", "fsdp"), 1):
        company = Company(scene, [f"run.steps={4 * part}", f"parallel.kind={kind}", net], "changing")
        company.ranks.folder.rename(scene.folder / f"changing-{part}")
        company.ranks.folder = scene.folder / f"changing-{part}"
        company.train(2, _START_S)
        sources = [event["step"] for event in company.events("restore")]
    scene.figure(went_on_from=" ".join(map(str, sources)))
    scene.check(sources == [4, 8], f"the parts went on from {sources}, not from steps 4 and 8")


def auto(scene: Scene) -> None:
    """Have one rank choose the size of its microbatches by what fits, and train with it.

    Asserts that memory decides, and not the number of samples; that no forward runs out of memory; and that the peak is
    35 % at least of what was free: four fifths of it, in the worst case halved so that microbatches are of one size.
    Figures: the size, GB of a sample and GB that were free, and the peak of the run as a share of these.
    """
    context, width, num_layers = (4096, 1024, 12) if scene.on_gpu else (32, 32, 2)
    overrides = [
        "run.steps=2",
        "batch={global_size: 64, microbatch_size: auto}",
        "scaling.num_workers=1",
        f"model={{kind: gpt, num_layers: {num_layers}, embed_dim: {width}, context_length: {context}, num_heads: 8}}",
        f"data={{target: 'tests.gpu.speed:Noise', args: {{context: {context}, vocabulary: 256}}}}",
        "task={kind: language_modeling}",
    ]
    company = _trained(scene, overrides, "auto")
    for event in company.events("microbatch_chosen"):
        size, sample, free = event["microbatch_size"], event["sample_bytes"], event["free_bytes"]
        scene.figure(microbatch_size=size, sample_gb=sample / 1e9, free_gb=free / 1e9)
        scene.check_on_gpu(size < 64, "all 64 samples fit, so nothing was decided: take a larger model")
        for note in company.memory()[-1:]:
            if "peak_bytes" in note:
                share = note["peak_bytes"] / free
                scene.figure(peak_share=share)
                scene.check(share >= 0.35, f"the peak is {share:.0%} of what was free")
    scene.check(len(company.events("microbatch_chosen")) == 1, "no size was chosen, or more than one")
    scene.check(not company.events("forwards_shrunk"), "memory has run out")


def staging(scene: Scene) -> None:
    """Save in every step while an update adds 1 to every weight, so that each file says which step it is of.

    Asserts that every checkpoint holds one value throughout, that of its step; that training waits for a copy no
    longer than its bytes at 30 GB/s and 5 ms, for the first two, whose memory is new, and for the others; and that host
    memory grows by at most 1.1 times two copies.
    Figures: checkpoints, GB of one, the waits of the first two, the longest of the others, the growth in copies.
    """
    width, steps = (8192, 60) if scene.on_gpu else (512, 12)
    overrides = [
        f"run.steps={steps}",
        f"model={{target: 'tests.gpu.subjects:Zeros', args: {{width: {width}}}}}",
        "optimizer={target: 'tests.gpu.subjects:CountingUp', max_grad_norm: null}",
        "checkpoint={every: 1 steps, keep_last: 6}",
    ]
    company = _trained(scene, overrides, "run")
    saved = company.events("checkpoint")
    scene.check(bool(saved), "nothing was saved")
    whole = [path for path in (scene.folder / "run").rglob("manifest.json")]
    for manifest in whole:
        _check_uniform(scene, manifest.parent)
    if saved:
        num_bytes = saved[0]["bytes"]
        blocked_s = [event["blocked_s"] for event in saved]
        first_s, others_s = blocked_s[:2], blocked_s[2:] or [0.0]
        scene.figure(num_saved=len(saved), num_read=len(whole), gb=num_bytes / 1e9)
        scene.figure(first_two_s=" ".join(map(str, first_s)), others_s=max(others_s))
        limit_s = num_bytes / 30e9 + 0.005
        for which, waits_s in (("one of the first two copies", first_s), ("a later copy", others_s)):
            claim = f"training waited {max(waits_s):.3f} s for {which}, not {limit_s:.3f} s"
            scene.check_on_gpu(max(waits_s) <= limit_s, claim)
        _check_growth(scene, company, num_bytes)


def _check_uniform(scene: Scene, checkpoint: Path) -> None:
    """Check that all weights of a checkpoint equal its step, as the format's own library reads them."""
    step = int(checkpoint.name.rpartition("-")[2])
    for path in checkpoint.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            if name.startswith("model."):
                low, high = tensor.min().item(), tensor.max().item()
                scene.check(low == high == step, f"step {step}: {name} holds {low:g} to {high:g}")


def _check_growth(scene: Scene, company: Company, num_bytes: int) -> None:
    """Compare the process's memory before its world with that after it."""
    sizes = [note["rss_bytes"] for note in company.memory()]
    if len(sizes) < 2:
        scene.check(False, "the member has said nothing of its memory")
        return
    copies = (sizes[-1] - sizes[0]) / num_bytes
    scene.figure(growth_in_copies=copies)
    scene.check_on_gpu(copies <= 2.2, f"host memory grew by {copies:.1f} copies of the state")
