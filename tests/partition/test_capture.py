"""A module as pieces: where it may be cut, and where not."""

import pytest

pytest.importorskip("torch")


from hpc3d.partition.capture import carries_batch, is_trained, state_of
from hpc3d.partition.factory import made
from tests.partition.sample_models import HERE, captured, small
from tests.partition.user_models import HERE as USERS

LONG = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("bert", "resnet", "densenet", "translation")
]


@pytest.fixture(params=["mlp", "unet", *LONG])
def model(request):
    return small(request.param)


def test_only_values_with_a_batch_dimension_cross_a_border(model):
    assert model.readers and all(map(carries_batch, model.readers))


def test_every_weight_is_read_by_a_piece(model):
    state = model.program.state_dict
    read = {id(state[name]) for piece in model.pieces for name in piece.weights}
    assert read == set(map(id, state.values()))


def test_each_piece_can_run_with_its_copies_and_inputs(model):
    """Each piece runs by itself, in the original order."""
    for place, piece in enumerate(model.pieces):
        there = {*model.weights, *model.inputs, *model.readers}
        for node in sorted((*piece.copies, *piece.nodes), key=[*model.program.graph.nodes].index):
            missing = {*node.all_input_nodes} - there
            assert not missing, (place, node, missing)
            there.add(node)


@pytest.mark.slow
def test_tied_weight_is_read_by_both_pieces():
    names = {"tokens.weight", "head.weight"}
    readers = [piece.module for piece in small("bert").pieces if names & {*piece.weights}]
    assert readers == ["tokens", "head"]


def millions(name):
    """Return the number of parameters of one of inputs/partition, in millions."""
    module, _ = made(f"inputs.partition.{name}")
    return sum(each.numel() for each in module.parameters()) / 1e6


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("bert:large", 336),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [
                ("resnet:enlarged(50, 1)", 26),
                ("resnet:resnet152_x8", 3729),
                ("densenet:densenet121", 8),
                ("translation:big", 214),
            ]
        ),
    ],
)
def test_parameter_counts_match_the_published_models(name, count):
    """The numbers are those of arXiv:1810.04805, 1512.03385, 1608.06993 and RaNNC's (2103.16063);
    1706.03762 has 213, including words that are not counted here."""
    assert round(millions(name)) == count


@pytest.mark.parametrize(
    ("hidden", "counts"),
    [
        (1024, (0.336, 0.639, 1.243, 1.848, 2.452, 3.259)),
        (1536, (0.732, 1.412, 2.772, 4.132, 5.492, 7.305)),
        (2048, (1.281, 2.489, 4.906, 7.324, 9.741, 12.964)),
    ],
)
def test_enlarged_bert_parameter_counts_match_the_published_ones(hidden, counts):
    """The numbers are in 10^9, for 24 to 256 layers of equal size."""
    first, second = (millions(f"bert:enlarged({hidden}, {n})") for n in (1, 2))
    found = [first + (layers - 1) * (second - first) for layers in (24, 48, 96, 144, 192, 256)]
    assert tuple(round(each / 1e3, 3) for each in found) == counts


def piece_of(found, name):
    (place,) = {place for node, place in found.piece_of.items() if node.name == name}
    return place


def test_values_without_a_batch_dimension_stay_with_their_readers():
    found = captured(f"{HERE}:branches")
    assert piece_of(found, "mean") == piece_of(found, "sub")
    assert piece_of(found, "chunk") == piece_of(found, "getitem") == piece_of(found, "getitem_1")
    masked = found.pieces[piece_of(found, "mul")]
    assert {"ones", "tril", "sum_1"} <= {node.name for node in masked.copies}
    assert not {node for node in found.piece_of if node.name in ("ones", "tril", "sum_1")}


def test_in_place_operations_stay_with_their_producer_and_reader():
    found = captured(f"{HERE}:branches")
    assert piece_of(found, "linear") == piece_of(found, "relu_") == piece_of(found, "mean")


def test_buffer_stays_with_the_module_that_writes_it():
    found = captured(f"{HERE}:branches")
    assert piece_of(found, "add_") == piece_of(found, "batch_norm")


def test_buffer_is_read_where_it_is_written():
    found = captured(f"{HERE}:counts")
    assert piece_of(found, "add") == piece_of(found, "copy_")


def test_operations_that_do_not_use_a_modified_buffer_are_separate():
    found = captured(f"{HERE}:averages")
    assert piece_of(found, "mul_") == piece_of(found, "add_")
    assert len({piece_of(found, name) for name in ("add_", "tanh", "tanh_1", "tanh_2")}) == 4


def test_operations_on_a_modified_buffer_stay_together():
    """Spectral normalization reads its vectors before and after it writes them."""
    found = captured(f"{USERS}:spectral")
    nodes = {node.name: node for node in found.program.graph.nodes}
    assert piece_of(found, "div") == piece_of(found, "mv") == piece_of(found, "linear_1")
    assert nodes["flatten"] not in found.piece_of


def test_counter_that_is_modified_twice_is_in_one_piece():
    found = captured(f"{USERS}:twice")
    assert piece_of(found, "add_") == piece_of(found, "add__1") == piece_of(found, "batch_norm_1")


def test_parameters_without_a_gradient_are_not_trained():
    state = state_of(captured(f"{USERS}:untrained"))
    assert {name for name, each in state.items() if is_trained(each)} == {
        *("a.weight", "a.bias", "b.weight", "b.bias")
    }


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        *(("by_name", 2), ("looks_into_its_weights", 3), ("held", 1)),
        pytest.param("copies_of_a_layer", None, marks=pytest.mark.slow),
    ],
)
def test_number_of_pieces_of_unusual_modules(name, pieces):
    found = captured(f"{HERE}:{name}")
    assert found.batch == 4 and len(found.pieces) == (pieces or len(found.pieces)) > 0
