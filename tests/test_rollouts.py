"""Rollouts: packed columns, and a parquet file that any tool may write or read."""

import math
from dataclasses import fields, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trueup.arrow import from_arrow, to_arrow
from trueup.rollouts import Rollouts, offsets_of, pack, segment_ids, segment_max, segment_sum

ROW_COLUMNS = ("learner_version", "step", "group", "reward", "temperature", "top_p", "top_k", "min_p")
NAN = float("nan")


def example(**columns) -> Rollouts:
    """Three rows: two tokens, none, one."""
    columns.setdefault("finish_reason", ["stop", "length", "stop"])
    return Rollouts.from_lists(
        [[1, 2], [3], [4, 5, 6]],
        [[7, 8], [], [9]],
        [[-0.5, NAN], [], [-2.0]],
        group=[0, 0, 1],
        engine="vllm:int8",
        **columns,
    )


def table(**changes) -> pa.Table:
    """What another tool would write at least, for two responses; a column set to None is left out."""
    columns = {
        "prompt_ids": pa.array([[1, 2], [3]], pa.list_(pa.int32())),
        "response_ids": pa.array([[4], [5, 6]], pa.list_(pa.int32())),
        "sampler_logprobs": pa.array([[-0.25], [-1.0, -2.0]], pa.list_(pa.float32())),
    }
    return pa.table({name: column for name, column in (columns | changes).items() if column is not None})


def assert_same(found: Rollouts, expected: Rollouts) -> None:
    for name in (field.name for field in fields(Rollouts)):
        left, right = getattr(found, name), getattr(expected, name)
        if isinstance(right, torch.Tensor):
            assert left.dtype == right.dtype, name
            torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True, msg=name)
        else:
            assert left == right, name


# What a float32 column can hold; NaN is the missing log-prob.
floats = st.floats(width=32, allow_nan=False)
logprobs = st.one_of(floats, st.just(NAN))
int32 = st.integers(-(2**31), 2**31 - 1)


@st.composite
def rollouts(draw, max_rows: int = 6) -> Rollouts:
    count = draw(st.integers(0, max_rows))
    lengths = draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    tokens = lambda values: [draw(st.lists(values, min_size=size, max_size=size)) for size in lengths]  # noqa: E731
    rows = lambda values: draw(st.lists(values, min_size=count, max_size=count))  # noqa: E731
    return Rollouts.from_lists(
        [draw(st.lists(int32, max_size=4)) for _ in lengths],
        tokens(int32),
        tokens(logprobs),
        learner_logprobs=tokens(logprobs) if draw(st.booleans()) else None,
        loss_mask=tokens(st.booleans()),
        sampler_version=tokens(int32),
        **{name: rows(int32) for name in ("learner_version", "step", "group", "top_k")},
        **{name: rows(floats) for name in ("temperature", "top_p", "min_p")},
        reward=rows(logprobs),
        finish_reason=rows(st.sampled_from(["stop", "length"])),
        engine=rows(st.text(st.characters(codec="utf-8"), max_size=8)),
    )


# --- parquet ----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rollouts())
def test_a_parquet_round_trip_changes_nothing(tmp_path, written):
    written.to_parquet(tmp_path / "dump.parquet")
    assert_same(Rollouts.from_parquet(tmp_path / "dump.parquet"), written)


def test_the_file_has_the_columns_types_and_metadata_of_schema_version_1(tmp_path):
    path = tmp_path / "new" / "step-000001.parquet"
    example(learner_logprobs=[-0.5, NAN, -2.0]).to_parquet(path)
    found = parquet.read_table(path)
    assert found.schema.metadata[b"trueup.schema"] == b"1"
    expected = {
        "prompt_ids": "list<int32>",
        "response_ids": "list<int32>",
        "sampler_logprobs": "list<float>",
        "learner_logprobs": "list<float>",
        "loss_mask": "list<bool>",
        "sampler_version": "list<int32>",
        "learner_version": "int32",
        "step": "int32",
        "group": "int32",
        "reward": "float",
        "temperature": "float",
        "top_p": "float",
        "top_k": "int32",
        "min_p": "float",
        "finish_reason": "string",
        "engine": "string",
    }
    names = {kind: f"list<{kind.value_type}>" if pa.types.is_list(kind) else str(kind) for kind in found.schema.types}
    assert {field.name: names[field.type] for field in found.schema} == expected
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]  # no temporary file


def test_a_missing_log_prob_is_null_in_the_file_and_nan_in_memory(tmp_path):
    example(learner_logprobs=[NAN, -1.0, NAN]).to_parquet(tmp_path / "dump.parquet")
    found = parquet.read_table(tmp_path / "dump.parquet")
    assert found.column("sampler_logprobs").to_pylist() == [[-0.5, None], [], [-2.0]]
    assert found.column("learner_logprobs").to_pylist() == [[None, -1.0], [], [None]]
    assert Rollouts.from_parquet(tmp_path / "dump.parquet").sampler_logprobs.isnan().tolist() == [False, True, False]


def test_responses_that_were_not_scored_have_no_learner_column(tmp_path):
    example().to_parquet(tmp_path / "dump.parquet")
    assert "learner_logprobs" not in parquet.read_table(tmp_path / "dump.parquet").column_names
    assert Rollouts.from_parquet(tmp_path / "dump.parquet").learner_logprobs is None


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "dump.parquet"
    example(step=1).to_parquet(path)

    def full(table, where, **options):
        where.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(parquet, "write_table", full)
    with pytest.raises(OSError, match="No space"):
        example(step=2).to_parquet(path)
    assert Rollouts.from_parquet(path).step.tolist() == [1, 1, 1]


def test_ids_and_sampler_log_probs_are_enough(tmp_path):
    parquet.write_table(table(), tmp_path / "foreign.parquet")
    found = Rollouts.from_parquet(str(tmp_path / "foreign.parquet"))
    assert_same(found, Rollouts.from_lists([[1, 2], [3]], [[4], [5, 6]], [[-0.25], [-1.0, -2.0]]))
    assert found.loss_mask.all() and found.sampler_version.tolist() == [0, 0, 0]
    assert found.reward.isnan().all() and found.learner_version.tolist() == [-1, -1]
    assert found.temperature.tolist() == [1, 1] and found.top_k.tolist() == [-1, -1] and found.engine == ["", ""]


def test_a_file_of_another_schema_version_is_refused_by_number(tmp_path):
    parquet.write_table(table().replace_schema_metadata({"trueup.schema": "7"}), tmp_path / "later.parquet")
    with pytest.raises(ValueError, match=r"later\.parquet has trueup\.schema=7; this trueup reads version 1"):
        Rollouts.from_parquet(tmp_path / "later.parquet")


@pytest.mark.parametrize("name", ["prompt_ids", "response_ids", "sampler_logprobs"])
def test_a_missing_column_is_named(name):
    with pytest.raises(ValueError, match=f"dump has no column {name}; it has"):
        from_arrow(table(**{name: None}), source="dump")


@pytest.mark.parametrize("name", ["sampler_logprobs", "learner_logprobs", "loss_mask", "sampler_version"])
def test_a_row_whose_tokens_do_not_line_up_is_named(name):
    value = False if name == "loss_mask" else 1 if name == "sampler_version" else -1.0
    ragged = pa.array([[value, value], [value]])  # as many values in all as there are tokens
    with pytest.raises(ValueError, match=f"dump, row 0: {name} has 2 values for 1 response tokens"):
        from_arrow(table(**{name: ragged}), source="dump")


def test_several_files_are_read_as_one(tmp_path):
    parts = [example(step=step, reward=[0.0, 1.0, step]) for step in range(3)]
    paths = [tmp_path / f"step-{step}.parquet" for step in range(3)]
    for part, path in zip(parts, paths):
        part.to_parquet(path)
    found = Rollouts.from_parquet(iter(paths))
    assert_same(found, Rollouts.concat(parts))
    assert found.step.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    with pytest.raises(ValueError, match="nothing to concatenate"):
        Rollouts.from_parquet([])


def test_folder_names_are_not_mistaken_for_columns(tmp_path):
    path = tmp_path / "step=7" / "engine=other" / "dump.parquet"
    example(step=3).to_parquet(path)
    assert_same(Rollouts.from_parquet(path), example(step=3))


# --- files of other tools ---------------------------------------------------------------------------------------------


def foreign(rows: Rollouts) -> pa.Table:
    """The same rows in the widest types: large lists, int64, float64, dictionary-encoded text."""

    def widen(field: pa.Field) -> pa.DataType:
        wide = {pa.int32(): pa.int64(), pa.float32(): pa.float64(), pa.bool_(): pa.bool_()}
        if pa.types.is_list(field.type):
            return pa.large_list(wide[field.type.value_type])
        return wide.get(field.type, pa.dictionary(pa.int32(), pa.string()))

    narrow = to_arrow(rows)
    return narrow.cast(pa.schema([(field.name, widen(field)) for field in narrow.schema]))


@settings(max_examples=40, deadline=None)
@given(rollouts(), st.data())
def test_any_slice_and_chunking_of_any_list_type_is_read(rows, data):
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    cut = data.draw(st.integers(start, stop))
    for whole in (to_arrow(rows), foreign(rows)):
        part = pa.concat_tables([whole.slice(start, cut - start), whole.slice(cut, stop - cut)])
        assert_same(from_arrow(part), rows.rows(range(start, stop)))


def test_several_row_groups_are_read(tmp_path):
    rows = Rollouts.concat([example(step=step) for step in range(5)])
    parquet.write_table(foreign(rows), tmp_path / "groups.parquet", row_group_size=2)
    assert parquet.ParquetFile(tmp_path / "groups.parquet").num_row_groups == 8
    assert_same(Rollouts.from_parquet(tmp_path / "groups.parquet"), rows)


def test_lists_of_a_fixed_size_are_read():
    found = from_arrow(table(prompt_ids=pa.array([[1, 2], [3, 4]], pa.list_(pa.int16(), 2))))
    assert found.prompt(1).tolist() == [3, 4]


@pytest.mark.parametrize(
    "absent",
    [pa.array([[None], [None, None]]), pa.nulls(2), pa.array([None, None], pa.list_(pa.float32()))],
    ids=["null values", "a null column", "null rows"],
)
def test_log_probs_that_no_engine_gave_are_nan_however_they_are_left_out(absent):
    found = from_arrow(table(sampler_logprobs=absent, learner_logprobs=absent))
    assert found.sampler_logprobs.isnan().all() and found.learner_logprobs.isnan().all()
    assert found.sampler_logprobs.dtype == torch.float32 and found.tokens == 3


def test_a_row_without_log_probs_does_not_move_those_of_others():
    found = from_arrow(table(sampler_logprobs=pa.array([None, [-1.0, None]], pa.list_(pa.float64()))))
    assert found.sampler_logprobs.isnan().tolist() == [True, False, True]
    assert found.sampler_logprobs[1] == -1


def test_null_values_of_optional_columns_take_the_default():
    found = from_arrow(
        table(
            loss_mask=pa.array([[False], [None, False]]),
            sampler_version=pa.array([None, [None, 4]]),
            step=pa.nulls(2),
            top_k=pa.array([None, 5]),
            reward=pa.array([True, None]),
            finish_reason=pa.array(["stop", None]),
        )
    )
    assert found.loss_mask.tolist() == [False, True, False]
    assert found.sampler_version.tolist() == [0, 0, 4]
    assert found.step.tolist() == [0, 0] and found.top_k.tolist() == [-1, 5]
    assert found.reward[0] == 1 and found.reward[1].isnan()
    assert found.finish_reason == ["stop", ""]


def test_a_token_without_an_id_is_refused():
    with pytest.raises(ValueError, match="dump: response_ids holds 1 null ids"):
        from_arrow(table(response_ids=pa.array([[4], [5, None]])), source="dump")


@pytest.mark.parametrize(
    "name, column, message",
    [
        ("response_ids", pa.array(["4", "5 6"]), "response_ids is string, expected list<int32>"),
        (
            "response_ids",
            pa.array([[4], [5, 2**33]]),
            "response_ids is list<.*int64>, expected list<int32>.* not in range",
        ),
        ("response_ids", pa.array([[4.0], [5.5, 6.0]]), "response_ids is list<.*double>, expected list<int32>"),
        ("reward", pa.array(["good", "bad"]), "reward is string, expected float"),
    ],
)
def test_a_column_that_cannot_hold_its_values_is_named_with_its_type(name, column, message):
    with pytest.raises(ValueError, match=f"dump: {message}"):
        from_arrow(table(**{name: column}), source="dump")


def test_columns_that_trueup_does_not_know_are_passed_over():
    assert len(from_arrow(table(note=pa.array(["a", "b"])))) == 2


# --- building ---------------------------------------------------------------------------------------------------------


def test_columns_may_be_one_value_a_flat_list_or_one_list_a_response():
    one = example(loss_mask=False, sampler_version=3, learner_logprobs=-1.0)
    flat = example(loss_mask=[False] * 3, sampler_version=[3] * 3, learner_logprobs=torch.full((3,), -1.0))
    rows = example(
        loss_mask=[[False] * 2, [], [False]], sampler_version=[[3, 3], [], [3]], learner_logprobs=[[-1, -1], [], [-1]]
    )
    assert_same(flat, one)
    assert_same(rows, one)
    assert one.learner_logprobs.dtype == torch.float32


def test_without_sampler_log_probs_all_are_missing():
    assert Rollouts.from_lists([[1]], [[2, 3]]).sampler_logprobs.isnan().tolist() == [True, True]


def test_no_rows_are_rollouts_too():
    empty = Rollouts.from_lists([], [], [])
    assert len(empty) == empty.tokens == 0
    assert_same(Rollouts.concat([empty, example(), empty]), example())
    assert empty.to_padded(empty.sampler_logprobs).shape == (0, 0)


@pytest.mark.parametrize("name", ["sampler_logprobs", "learner_logprobs", "loss_mask", "sampler_version"])
def test_lists_that_do_not_line_up_with_their_responses_are_refused_by_row(name):
    with pytest.raises(ValueError, match=f"row 0: {name} has 1 values for 2 response tokens"):
        Rollouts.from_lists([[1], [1]], [[2, 3], [4]], **{name: [[0], [0, 0]]})
    with pytest.raises(ValueError, match=f"{name} has 1 rows for 2 responses"):
        Rollouts.from_lists([[1], [1]], [[2, 3], [4]], **{name: [[0, 0]]})


def test_an_unknown_column_is_refused_by_name():
    with pytest.raises(TypeError, match=r"unknown rollout columns \['rewards'\]; known: .*'reward'"):
        example(rewards=1.0)


@pytest.mark.parametrize(
    "name", ["response_ids", "sampler_logprobs", "learner_logprobs", "loss_mask", "sampler_version"]
)
def test_a_token_column_of_the_wrong_length_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} holds 2 tokens but the responses have 3"):
        replace(example(learner_logprobs=-1.0), **{name: torch.zeros(2)})


@pytest.mark.parametrize("name", [*ROW_COLUMNS, "finish_reason", "engine"])
def test_a_row_column_of_the_wrong_length_is_refused(name):
    value = ["stop"] * 2 if name in ("finish_reason", "engine") else torch.zeros(2)
    with pytest.raises(ValueError, match=f"{name} holds 2 values for 3 responses"):
        replace(example(), **{name: value})


def test_prompts_that_do_not_fit_the_responses_are_refused():
    with pytest.raises(ValueError, match="2 prompts for 3 responses; give one prompt a response"):
        replace(example(), prompt_offsets=torch.tensor([0, 2, 6]))
    with pytest.raises(ValueError, match="prompt_ids holds 5 tokens but prompt_offsets ends at 6"):
        replace(example(), prompt_ids=torch.zeros(5, dtype=torch.int32))


# --- padded frameworks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left_prompts", [True, False])
@pytest.mark.parametrize("left_responses", [True, False])
def test_padding_on_either_side_is_taken_off(left_prompts, left_responses):
    def pad(rows, left, fill):
        width = max(len(row) for row in rows) + 1  # a column of padding alone
        return torch.tensor(
            [[fill] * (width - len(row)) + row if left else row + [fill] * (width - len(row)) for row in rows]
        )

    prompts, responses = [[1, 2], [3], [4, 5, 6]], [[7, 8], [], [9]]
    mask = lambda rows, left: pad([[1] * len(row) for row in rows], left, 0)  # noqa: E731
    tokens = lambda rows: pad(rows, left_responses, 99)  # noqa: E731
    found = Rollouts.from_padded(
        pad(prompts, left_prompts, 99),
        mask(prompts, left_prompts),
        tokens(responses),
        mask(responses, left_responses),
        sampler_logprobs=tokens([[-0.5, NAN], [], [-2.0]]).double(),
        learner_logprobs=tokens([[-1.0, -1.5], [], [-2.5]]).double(),
        loss_mask=tokens([[1, 0], [], [1]]),
        group=torch.tensor([0, 0, 1]),
        finish_reason=["stop", "length", "stop"],
        engine="vllm:int8",
    )
    assert_same(found, example(learner_logprobs=[-1.0, -1.5, -2.5], loss_mask=[True, False, True]))


@settings(max_examples=40, deadline=None)
@given(rollouts())
def test_to_padded_and_back_changes_nothing(rows):
    padded = rows.to_padded(rows.response_ids, fill=-7)
    width = max(rows.lengths.tolist(), default=0)
    assert padded.shape == (len(rows), width) and padded.dtype == torch.int32
    mask = rows.to_padded(torch.ones(rows.tokens, dtype=torch.bool), fill=False)
    assert (padded[~mask] == -7).all()
    assert mask.sum(1).tolist() == rows.lengths.tolist()
    assert torch.equal(padded[mask], rows.response_ids)


def test_to_padded_by_hand():
    assert example().to_padded(example().response_ids, fill=-1).tolist() == [[7, 8], [-1, -1], [9, -1]]


# --- picking and joining ----------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(rollouts(), st.data())
def test_rows_are_those_asked_for_in_the_order_asked(rows, data):
    index = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8)) if len(rows) else []
    picked = rows.rows(index)
    assert len(picked) == len(index)
    for place, row in enumerate(index):
        assert torch.equal(picked.prompt(place), rows.prompt(row))
        assert torch.equal(picked.response(place), rows.response(row))
        assert picked.engine[place] == rows.engine[row]
    assert_same(picked, Rollouts.concat([rows.rows([row]) for row in index] or [rows.rows([])]))


@settings(max_examples=40, deadline=None)
@given(rollouts(), st.data())
def test_cutting_anywhere_and_joining_changes_nothing(rows, data):
    cut = data.draw(st.integers(0, len(rows)))
    assert_same(Rollouts.concat([rows.rows(range(cut)), rows.rows(range(cut, len(rows)))]), rows)


def test_a_bool_per_response_picks_where_it_is_true():
    mask = torch.tensor([False, True, True])
    assert_same(example().rows(mask), example().rows([1, 2]))


def test_a_row_that_is_not_there_is_an_error():
    with pytest.raises(IndexError):
        example().rows([3])


def test_learner_log_probs_survive_joining_only_where_every_part_has_them():
    scored = example(learner_logprobs=-1.0)
    assert Rollouts.concat([scored, scored]).learner_logprobs.tolist() == [-1.0] * 6
    assert Rollouts.concat([scored, example()]).learner_logprobs is None


def test_picking_and_joining_copy_what_they_return():
    rows = example()
    picked, joined = rows.rows([0, 1, 2]), Rollouts.concat([rows])
    picked.reward[:] = 5
    joined.sampler_logprobs[:] = 5
    assert rows.reward.isnan().all() and rows.sampler_logprobs[0] == -0.5


# --- segments ---------------------------------------------------------------------------------------------------------


def test_segments_by_hand():
    offsets = offsets_of([2, 0, 1])
    assert offsets.tolist() == [0, 2, 2, 3] and offsets.dtype == torch.int64
    assert segment_ids(offsets).tolist() == [0, 0, 2]
    assert segment_sum(torch.tensor([1.0, 2.0, 4.0]), offsets).tolist() == [3, 0, 4]
    assert segment_max(torch.tensor([1.0, 2.0, -4.0]), offsets).tolist() == [2, -math.inf, -4]
    assert segment_max(torch.tensor([1.0, 2.0, -4.0]), offsets, empty=0.0).tolist() == [2, 0, -4]
    assert pack([[1, 2], [], [3]], torch.int32).tolist() == [1, 2, 3]
    assert pack([], torch.bool).dtype == torch.bool


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(-9, 9), max_size=5), max_size=6))
def test_segments_are_pythons_sum_and_max_of_each_row(rows):
    values, offsets = pack(rows, torch.float64), offsets_of([len(row) for row in rows])
    np.testing.assert_array_equal(segment_sum(values, offsets), [sum(row) for row in rows])
    np.testing.assert_array_equal(segment_max(values, offsets), [max(row, default=-math.inf) for row in rows])
