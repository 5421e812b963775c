"""GradientReducer gives the gradients of torch DDP, to the bit, on a model left as it is."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from trainpath.comm import GradientReducer
from trainpath.errors import ConfigError, ReplicaMismatchError, UnreducedGradientError
from trainpath.metrics import StepClock
from trainpath.metrics import segments as S
from trainpath.testing import spawn

SMALL = 0.00004  # MiB: a handful of buckets even for tiny models


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)
        )

    def forward(self, x):
        return self.layers(x)


class ConvNorm(nn.Module):
    def __init__(self, memory_format=torch.contiguous_format):
        super().__init__()
        self.conv = nn.Conv2d(2, 5, 3).to(memory_format=memory_format)
        self.norm = nn.BatchNorm2d(5)
        self.head = nn.Linear(5, 1)

    def forward(self, x):
        image = F.pad(x.reshape(-1, 1, 2, 3), (1, 2, 1, 2)).expand(-1, 2, -1, -1)
        return self.head(torch.relu(self.norm(self.conv(image))).mean((2, 3)))


class ChannelsLast(ConvNorm):
    def __init__(self):
        super().__init__(torch.channels_last)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6)
        self.again.weight = self.inside.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, x):
        x = self.again(torch.tanh(self.inside(x)))
        return (x * self.scale).sum(1, keepdim=True) + self.nothing.sum()


class Branches(nn.Module):
    """Rank 1 uses another branch than rank 0; `never` is used by nobody."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.left = nn.Linear(8, 1)
        self.right = nn.Linear(8, 1)
        self.never = nn.Linear(8, 1)
        self.step = 0

    def forward(self, x):
        self.step += 1
        x = torch.relu(self.stem(x))
        everybody = self.step % 3 == 0
        one = self.left if dist.get_rank() == 0 or everybody else self.right
        return one(x)


class Checkpointed(nn.Module):
    reentrant = False

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.last = nn.Linear(8, 1)

    def forward(self, x):
        x = self.first(x)
        # The block's weights are used in two recomputed segments.
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.last(x)


class Reentrant(Checkpointed):
    reentrant = True


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.narrow = nn.Linear(6, 8)
        self.wide = nn.Linear(8, 8).double()
        self.short = nn.Linear(8, 1).bfloat16()
        self.phase = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, x):
        x = torch.view_as_real(self.narrow(x) * self.phase).sum(-1)
        return self.short(self.wide(x.double()).bfloat16()).float()


class TwoPaths(nn.Module):
    """Called twice before one backward."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.inner = Mlp()

    def forward(self, x):
        return self.inner(self.norm(x))


CASES = {
    "mlp": (Mlp, {}),
    "conv": (ConvNorm, {}),
    "channels_last": (ChannelsLast, {}),
    "tied": (Tied, {}),
    "branches": (Branches, {"find_unused_parameters": True}),
    "checkpointed": (Checkpointed, {}),
    "reentrant": (Reentrant, {"static_graph": True}),
    "mixed": (Mixed, {}),
    "two_forwards": (TwoPaths, {}),
}


def make(kind, seed=3):
    """Build a model; other ranks begin with other weights than rank 0."""
    torch.manual_seed(seed + (dist.get_rank() if dist.is_initialized() else 0))
    return kind()


def batches(steps):
    """This rank's batches."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    return [
        (torch.randn(5, 6, generator=generator), torch.randn(5, 1, generator=generator))
        for _ in range(steps)
    ]


def optimizer_of(name, model):
    """Return an optimizer with state."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def train(module, call, no_sync, *, optimizer="sgd", steps=6, accumulate=1, set_to_none=True):
    """Train; return parameters and gradients of every step."""
    optimizer = optimizer_of(optimizer, module)
    seen = []
    for number, (x, y) in enumerate(batches(steps * accumulate)):
        last = (number + 1) % accumulate == 0

        def loss(x=x, y=y):
            output = call(x)
            if isinstance(module, TwoPaths):
                output = output + call(x.flip(0))
            return F.mse_loss(output, y)

        if last:
            loss().backward()
            grads = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            seen.append((grads, [p.detach().clone() for p in module.parameters()]))
        else:
            with no_sync():
                loss().backward()
    seen.append(([], list(module.buffers())))
    return seen


def differences(expected, got, same=torch.equal):
    """Return the steps and places at which two trainings differ."""
    found = []
    for step, (left, right) in enumerate(zip(expected, got, strict=True)):
        for part in (0, 1):
            for index, (a, b) in enumerate(zip(left[part], right[part], strict=True)):
                if (a is None) != (b is None) or (a is not None and not same(a, b)):
                    found.append((step, part, index))
    return found


def against_ddp(same=torch.equal):
    """Train every case with DDP and with the reducer; return what differs."""
    failing = {}
    variants = [
        {},
        {"optimizer": "adamw"},
        {"accumulate": 3},
        {"accumulate": 2, "set_to_none": False, "optimizer": "adamw"},
    ]
    for name, (kind, options) in CASES.items():
        for variant in variants:
            if same is close_to and (name == "mixed" or variant.get("optimizer") == "adamw"):
                continue  # bfloat16, or Adam on a gradient of zero, turn rounding into a step
            if name == "reentrant" and "accumulate" in variant:
                continue  # torch's DDP fails there (static_graph with no_sync)
            model = make(kind)
            ddp = DistributedDataParallel(model, **options)
            expected = train(model, ddp, ddp.no_sync, **variant)
            model = make(kind)
            with GradientReducer(model, bucket_cap_mb=SMALL, first_bucket_mb=SMALL) as reducer:
                got = train(model, model, reducer.no_sync, **variant)
                buckets = reducer.stats()["num_buckets"]
            found = differences(expected, got, same)
            if found or buckets < 2:
                failing[name, str(variant)] = (found, buckets)
    return failing


def close_to(a, b):
    """Tell whether two tensors agree up to the order of sums."""
    return torch.allclose(a, b, rtol=1e-5, atol=1e-5)


def three_ranks():
    """Compare with DDP, and the ranks with each other."""
    failing = against_ddp(close_to)
    model = make(Branches)
    reducer = GradientReducer(model, bucket_cap_mb=SMALL, first_bucket_mb=SMALL)
    seen = train(model, model, reducer.no_sync, accumulate=2)
    reducer.close()
    pair = dist.new_group([1, 2])
    if dist.get_rank():
        model = make(Mlp)
        with GradientReducer(model, process_group=pair) as reducer:
            train(model, model, reducer.no_sync)
            failing["pair"] = reducer.stats()["num_steps"]
        parameter = next(model.parameters()).detach()
        other = parameter.clone()
        dist.broadcast(other, 2, group=pair)
        if torch.equal(parameter, other) and failing.pop("pair") != 6:
            failing["pair"] = "steps"
    return failing, [[t.tolist() for t in parameters] for _, parameters in seen]


def test_gradients_equal_ddp_on_two_ranks():
    """Nine models, two optimizers, with and without accumulation: equal to DDP to the bit."""
    assert spawn(against_ddp, 2, timeout_s=55) == [{}, {}]


def test_three_ranks_are_close_to_ddp_and_equal_to_each_other():
    """With three ranks sums may round otherwise than DDP's, but alike on all ranks."""
    results = spawn(three_ranks, 3, timeout_s=55)

    assert [failing for failing, _ in results] == [{}, {}, {}]
    assert results[0][1] == results[1][1] == results[2][1]


class Staged(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def frozen_then_unfrozen(new_wrapper):
    """Train four steps with the body frozen, then with it, then with the head frozen."""
    model = make(Staged)
    seen = []
    reducer = None if new_wrapper else GradientReducer(make_frozen(model, "body"))
    for frozen in ("body", None, "head"):
        make_frozen(model, frozen)
        call = DistributedDataParallel(model) if new_wrapper else model
        seen += train(model, call, None, steps=4)
    if reducer is not None:
        reducer.close()
    return seen


def make_frozen(model, which):
    """Freeze one part of a model, unfreeze the other."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(which is None or not name.startswith(which))
        if not parameter.requires_grad:
            parameter.grad = None
    return model


def frozen_case():
    """Compare with a new DDP for each stage."""
    return differences(frozen_then_unfrozen(True), frozen_then_unfrozen(False))


def sync_at_either_place():
    """Return whether gradients are equal across ranks after each placement of no_sync."""
    results = []
    for around_forward in (True, False):
        for around_backward in (True, False):
            model = make(Mlp)
            with GradientReducer(model) as reducer:
                ((x, y),) = batches(1)
                outside = reducer.no_sync()
                if around_forward:
                    with outside:
                        loss = F.mse_loss(model(x), y)
                else:
                    loss = F.mse_loss(model(x), y)
                if around_backward:
                    with reducer.no_sync():
                        loss.backward()
                else:
                    loss.backward()
                results.append(alike(next(model.parameters()).grad))
    return results


def alike(tensor):
    """Whether a tensor is equal on all ranks (a collective)."""
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, tensor.tolist())
    return all(other == everyones[0] for other in everyones)


def several_backwards():
    """Two losses of one forward, each with its backward, against their sum with DDP."""
    ((x, y),) = batches(1)
    model = make(Mlp)
    ddp = DistributedDataParallel(model)
    output = ddp(x)
    (F.mse_loss(output, y) + output.sum()).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model = make(Mlp)
    with GradientReducer(model, bucket_cap_mb=SMALL):
        output = model(x)
        F.mse_loss(output, y).backward(retain_graph=True)
        output.sum().backward()
        return all(
            torch.allclose(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True)
        )


def autograd_grad_is_local():
    """Only rank 0 calls autograd.grad; nobody waits for anybody."""
    model = make(Mlp)
    with GradientReducer(model) as reducer:
        ((x, y),) = batches(1)
        if dist.get_rank() == 0:
            x.requires_grad_(True)
            torch.autograd.grad(model(x).sum(), x)
            with torch.no_grad():
                model(x)
        before = reducer.stats()["num_steps"]
        F.mse_loss(model(x), y).backward()
        return before, reducer.stats()["num_steps"], alike(next(model.parameters()).grad)


def triple(parameter):
    """A hook of the user."""
    parameter.grad.mul_(3)


def launched_during_backward():
    """Return how many buckets were on their way when the last gradient came, per step."""
    model = make(Mlp)
    seen = []
    with GradientReducer(model, bucket_cap_mb=SMALL, first_bucket_mb=SMALL) as reducer:
        first = model.layers[0].weight
        first.register_post_accumulate_grad_hook(
            lambda _: seen.append(reducer._pipeline.num_launched)
        )
        train(model, model, reducer.no_sync, steps=4)
    return seen


def converted_later():
    """Return the error of a model converted behind the reducer's back."""
    model = make(Mlp)
    with GradientReducer(model):
        model.double()
        try:
            model(batches(1)[0][0].double())
        except ConfigError as error:
            return str(error)
    return None


def user_hooks_come_first():
    """A post-accumulate hook of the user changes what is averaged, as with DDP."""
    grads = []
    for ours in (False, True):
        model = make(Mlp)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(triple)
        call = DistributedDataParallel(model) if not ours else model
        reducer = GradientReducer(model) if ours else None
        ((x, y),) = batches(1)
        F.mse_loss(call(x), y).backward()
        grads.append([p.grad.clone() for p in model.parameters()])
        if reducer is not None:
            reducer.close()
    return all(map(torch.equal, *grads))


def guarded_step():
    """Return the error of a step on local gradients, and whether a right step passes."""
    model = make(Mlp)
    optimizer = optimizer_of("sgd", model)
    with GradientReducer(model) as reducer:
        reducer.guard(optimizer)
        ((x, y),) = batches(1)
        with reducer.no_sync():
            F.mse_loss(model(x), y).backward()
        try:
            optimizer.step()
        except UnreducedGradientError as error:
            message = str(error)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        with reducer.no_sync():
            F.mse_loss(model(x), y).backward()
    optimizer.step()  # closed: no longer guarded
    return message


def traceless():
    """Return what copies and pickles of a reduced model carry, and what close() leaves."""
    model = make(ConvNorm)
    keys = list(model.state_dict())
    reducer = GradientReducer(model)
    same = (type(model) is ConvNorm, list(model.state_dict()) == keys)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    restored = torch.load(file, weights_only=False)
    copied = copy.deepcopy(model)
    x = batches(1)[0][0]
    if dist.get_rank() == 0:  # copies are not reduced: one rank alone does not wait
        for other in (copied, restored):
            other(x).sum().backward()
    reducer.close()
    reducer.close()
    hooks = len(model._forward_pre_hooks) + len(model._forward_hooks)
    if dist.get_rank() == 0:
        model(x).sum().backward()
    return same, hooks


def plan_travels():
    """A reducer that took the state of another has its plan, and reduces alike."""
    model = make(Mlp)
    caps = {"bucket_cap_mb": SMALL, "first_bucket_mb": SMALL}
    with GradientReducer(model, **caps) as reducer:
        train(model, model, reducer.no_sync, steps=3)
        state = reducer.state_dict()
    with GradientReducer(model, **caps) as reducer:
        reducer.load_state_dict(state)
        train(model, model, reducer.no_sync, steps=1)
        return state["step"], reducer.state_dict() == {**state, "step": state["step"] + 1}


def refused_models():
    """Return the errors for models that the reducer must not touch."""
    model = make(Mlp)
    reducer = GradientReducer(model)
    messages = []
    for refused in (
        model,
        DistributedDataParallel(make(Mlp)),
        nn.Sequential(nn.Embedding(4, 2, sparse=True)),
    ):
        try:
            GradientReducer(refused)
        except ConfigError as error:
            messages.append(str(error))
    reducer.close()
    return messages


def sub_group():
    """Reduce over a group of one's own, while the other rank does nothing."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    mine = groups[dist.get_rank()]
    model = make(Mlp)
    with GradientReducer(model, process_group=mine) as reducer:
        ((x, y),) = batches(1)
        F.mse_loss(model(x), y).backward()
        alone = reducer.stats()["bytes_sent"]
    try:
        GradientReducer(model, process_group=groups[1 - dist.get_rank()])
    except ConfigError:
        return alone, True
    return alone, False


def semantics():
    """Run the cases that need no spawn of their own."""
    return {
        "frozen": frozen_case(),
        "no_sync": sync_at_either_place(),
        "several": several_backwards(),
        "grad": autograd_grad_is_local(),
        "launched": launched_during_backward(),
        "converted": converted_later(),
        "hooks": user_hooks_come_first(),
        "guard": guarded_step(),
        "traceless": traceless(),
        "plan": plan_travels(),
        "refused": refused_models(),
        "group": sub_group(),
    }


@pytest.fixture(scope="module")
def two_ranks():
    """What both ranks saw in the cases above."""
    return spawn(semantics, 2, timeout_s=55)


def test_frozen_parameters_are_left_out_and_picked_up(two_ranks):
    """Freezing and unfreezing between steps equals a DDP built anew for each stage."""
    assert [result["frozen"] for result in two_ranks] == [[], []]


def test_no_sync_counts_at_forward_and_at_backward(two_ranks):
    """Gradients stay local if either pass ran in no_sync, and are equal if none did."""
    for result in two_ranks:
        assert result["no_sync"] == [False, False, False, True]


def test_each_backward_of_one_forward_is_reduced(two_ranks):
    """Two backward calls give the gradient of the sum of both losses."""
    assert all(result["several"] for result in two_ranks)


def test_passes_without_parameter_gradients_make_no_collective(two_ranks):
    """autograd.grad and evaluation on one rank alone neither wait nor count."""
    assert [result["grad"] for result in two_ranks] == [(0, 1, True)] * 2


def test_buckets_leave_during_backward(two_ranks):
    """All but the last are on their way before backward ends, once the order is learned."""
    for result in two_ranks:
        assert result["launched"][0] == 0
        assert min(result["launched"][1:]) >= 2


def test_a_model_converted_later_is_refused(two_ranks):
    """Converting replaces what the hooks sit on: an error, not silent local gradients."""
    assert all("before" in result["converted"] for result in two_ranks)


def test_hooks_of_the_user_run_before_the_reduction(two_ranks):
    """A post-accumulate hook sees the local gradient, as with DDP."""
    assert all(result["hooks"] for result in two_ranks)


def test_guard_refuses_a_step_on_local_gradients(two_ranks):
    """optimizer.step() after no_sync raises, naming rank, step and parameter."""
    for rank, result in enumerate(two_ranks):
        assert f"rank {rank}, step 0" in result["guard"]
        assert "layers.0.weight" in result["guard"]


def test_the_model_stays_as_it_is(two_ranks):
    """Type and keys stay; copies, pickles and the closed model carry no working hook."""
    assert [result["traceless"] for result in two_ranks] == [((True, True), 0)] * 2


def test_the_plan_is_state(two_ranks):
    """A resumed reducer sums in the order it had, from its first step."""
    assert [result["plan"] for result in two_ranks] == [(3, True)] * 2


def test_models_that_somebody_reduces_are_refused(two_ranks):
    """DDP, a second reducer and sparse gradients each give an error with a way out."""
    for result in two_ranks:
        again, wrapped, sparse = result["refused"]
        assert "close()" in again
        assert "comm_hook" in wrapped
        assert "sparse=False" in sparse


def test_a_group_of_ones_own_is_enough(two_ranks):
    """A group of one rank sends nothing; a group without this rank is refused."""
    assert [result["group"] for result in two_ranks] == [(0, True)] * 2


def other_model_on_rank_1(width):
    """Build a model that differs, or not, on rank 1."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, width if dist.get_rank() else 2))
    try:
        GradientReducer(model)
    except ReplicaMismatchError as error:
        return str(error)
    return None


def test_another_model_on_a_rank_is_refused_on_all():
    """The error names the first difference and the rank, on every rank."""
    for message in spawn(other_model_on_rank_1, 2, args=(5,)):
        assert "rank 1" in message
        assert "'1.weight', float32, shape (5, 4)" in message
        assert "shape (2, 4)" in message


def test_one_process_only_marks_the_clock():
    """Without a process group gradients stay as they are; arrival and departure are marked."""
    clock = StepClock()
    torch.manual_seed(0)
    model = Mlp()
    with GradientReducer(model, clock=clock) as reducer:
        clock.switch(S.BACKWARD)
        model(torch.ones(2, 6)).sum().backward()
        clock.end_step()
        assert reducer.stats()["bytes_reduced"] == 0
        assert reducer.stats()["num_steps"] == 1
    ((record,), _) = clock.drain()
    assert 0 < record.arrive_ns <= record.depart_ns
    assert record.segments_ns[S.BACKWARD] > 0


def test_bad_arguments_are_refused():
    """A cap or deadline of nothing makes no sense."""
    for bad in ({"bucket_cap_mb": 0}, {"first_bucket_mb": -1}, {"timeout_s": 0}):
        with pytest.raises(ConfigError, match="above 0"):
            GradientReducer(nn.Linear(1, 1), **bad)
