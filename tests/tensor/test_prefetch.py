"""Order in which weights are gathered and reduced during products."""

from types import SimpleNamespace

from hpc3d.comm.communicator import ready
from hpc3d.tensor.matmul import Saved
from hpc3d.tensor.prefetch import Prefetch


def layer(name, order, moves=True):
    """Return a layer whose weight is its name; `order` records the calls that start."""

    def start_gather_w(w):
        order.append(f"gather {w}")
        return ready(w)

    matmul = SimpleNamespace(
        moves_w=moves,
        prefetch=None,
        complete=lambda letter: not moves,
        start_gather_w=start_gather_w,
    )
    return SimpleNamespace(matmul=matmul, stored_w=lambda saved: name if not saved else saved.w)


def multiply(layer, order, saved=None):
    """Compute the product of a layer, which requests its weight."""
    w, matmul = layer.stored_w(saved), layer.matmul
    pending = matmul.prefetch.gathered(matmul, w) if matmul.prefetch else matmul.start_gather_w(w)
    order.append(f"multiply {pending.wait()}")


def test_next_weight_is_gathered_before_the_current_product():
    order = []
    layers = [layer(name, order) for name in "abc"]
    prefetch = Prefetch((each, None) for each in layers)
    prefetch.begin((each, None) for each in layers)
    for each in layers:
        multiply(each, order)
    expected = "gather a, gather b, multiply a, gather c, multiply b, multiply c"
    assert ", ".join(order) == expected
    order.clear()
    prefetch.begin([])  # the last pass is complete
    multiply(layers[0], order)
    assert order == ["gather a", "multiply a"]


def test_weights_that_do_not_move_or_are_saved_are_not_gathered():
    order = []
    one, still, kept, last = (layer(name, order, name != "b") for name in "abcd")
    prefetch = Prefetch((each, None) for each in (one, still, kept, last))
    assert still.matmul.prefetch is None
    saved = Saved(None, "c", "w")
    prefetch.begin([(one, None), (still, None), (kept, saved), (last, Saved(None, "D", "x"))])
    multiply(one, order)
    assert order == ["gather a", "gather D", "multiply a"]


def test_reduction_ends_after_the_next_product():
    order, prefetch = [], Prefetch([])
    for name in "ab":
        order.append(f"product {name}")
        prefetch.later(ready(name).then(lambda name: order.append(f"end {name}")))
    prefetch.later(None)
    prefetch.later(None)
    assert order == ["product a", "product b", "end a", "end b"]
