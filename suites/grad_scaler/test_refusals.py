"""Bad input of a gradient scaler is refused by an error, and what it scales may lie in any container."""

import inspect

import pytest
import torch
import torch.distributed as dist

from lockstep.conformance.models import KnownGradient

pytestmark = pytest.mark.ranks(2)

INF, NAN = float("inf"), float("nan")
BAD = (TypeError, ValueError, RuntimeError, AssertionError)

SETTINGS = {
    "zero": {"init_scale": 0.0},
    "inf": {"init_scale": INF},
    "nan": {"init_scale": NAN},
    "negative": {"init_scale": -1.0},
    "group": {"process_group": "world"},
    "group_in_pair": {"process_group": ("a", "b")},
    "not_in_group": {"process_group": dist.GroupMember.NON_GROUP_MEMBER},
}


def test_settings_that_cannot_scale_are_refused(trained, run_subtests):
    def claim(what):
        with pytest.raises(BAD):
            trained(KnownGradient(3), SETTINGS[what])

    run_subtests({"what": list(SETTINGS)}, claim)


def test_a_rank_outside_of_the_group_is_named(world, trained):
    with pytest.raises(ValueError, match=f"rank {world.rank} "):
        trained(KnownGradient(3), SETTINGS["not_in_group"])


def test_what_is_left_out_is_as_documented_by_torch(trained):
    found = inspect.signature(type(trained(KnownGradient(3)).scaler)).parameters
    expected = {"init_scale": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
    expected["enabled"] = True
    assert {name: found[name].default for name in expected} == expected


def test_what_would_ruin_the_scale_is_refused(world, trained, run_subtests):
    """And the scale stays as it is."""

    def claim(what):
        run = trained(KnownGradient(3))
        scaler, optimizer = run.scaler, run.optimizers[0]
        run.backward(1.0)
        state = scaler.state_dict()
        act = {
            "new_scale": lambda: (scaler.step(optimizer), scaler.update(0.0)),
            "new_tensor": lambda: scaler.update(torch.tensor(INF, device=world.device)),
            "state": lambda: scaler.load_state_dict(state | {"scale": 0.0}),
            "state_inf": lambda: scaler.load_state_dict(state | {"scale": INF}),
            "disabled_state": lambda: scaler.load_state_dict({}),
            "closure": lambda: scaler.step(optimizer, lambda: 1.0),
            "number": lambda: scaler.scale(1.0),
            "text": lambda: scaler.scale("loss"),
            "update": lambda: scaler.update(),
            "twice": lambda: (scaler.step(optimizer), scaler.step(optimizer)),
            "unscaled_twice": lambda: (scaler.unscale_(optimizer), scaler.unscale_(optimizer)),
        }[what]
        with pytest.raises(BAD):
            act()
        assert run.scales() == [8.0] * world.size

    kinds = ["new_scale", "new_tensor", "state", "state_inf", "disabled_state", "closure", "number", "text"]
    run_subtests({"what": [*kinds, "update", "twice", "unscaled_twice"]}, claim)


def test_all_tensors_in_a_container_are_scaled(world, trained):
    run = trained(KnownGradient(3))
    one = torch.ones(2, device=world.device)
    found = run.scaler.scale([one, (one.double(), one.half())])
    assert [type(found), type(found[1])] == [list, tuple]
    assert [t.dtype for t in (found[0], *found[1])] == [torch.float32, torch.float64, torch.float16]
    assert {t.tolist()[0] for t in (found[0], *found[1])} == {8.0}
    drawn = run.scaler.scale(value for value in (one, 2 * one))
    assert [value.tolist() for value in drawn] == [[8.0] * 2, [16.0] * 2]


def test_a_disabled_scaler_gives_back_what_it_gets(trained):
    run = trained(KnownGradient(3), {"enabled": False})
    loss = object()
    assert run.scaler.scale(loss) is loss
    run.scaler.load_state_dict({})
    assert run.scaler.state_dict() == {}
    run.step(2.0)
    assert run.weights() == [[-2.0] * 3]


def test_a_scale_in_the_place_of_the_device_is_refused(trained):
    kind = type(trained(KnownGradient(3)).scaler)
    with pytest.raises(TypeError, match="init_scale"):
        kind(2.0**16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_a_scaler_for_a_device_that_is_not_there_says_so_and_is_off(trained):
    kind = type(trained(KnownGradient(3)).scaler)
    with pytest.warns(UserWarning, match="CUDA is not available"):
        scaler = kind("cuda")
    assert not scaler.is_enabled()
