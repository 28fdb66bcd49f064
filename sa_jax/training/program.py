"""What a run compiles: its model, mesh, shardings and jitted functions."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np
from absl import logging
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from sa_jax.evaluation.perplexity import draw_keys, evaluate, row_losses
from sa_jax.models.config import DecoderConfig
from sa_jax.models.decoder import Decoder
from sa_jax.models.sharding import (
    batch_sharding,
    check_divisible,
    make_mesh,
    parameter_shardings,
    partition_spec,
)
from sa_jax.training.configuration import flatten
from sa_jax.training.optimizer import learning_rate_schedule, make_optimizer
from sa_jax.training.step import TrainState, init_state, split_batch, train_step


@dataclasses.dataclass(frozen=True)
class Program:
    """The parts of a run that depend on its configuration and devices only.

    Attributes:
      config: the run's configuration.
      model_config: the architecture.
      mesh: the devices, with axes data, fsdp, tensor, sequence.
      graph: the model without its parameters, for `nnx.merge`.
      abstract_state: shapes, types and shardings of the training state.
      init: maps nothing to the initial state, computed directly in its shards.
      step: maps (state, placed batch) to (state, metrics); the given state is donated.
    """

    config: ConfigDict
    model_config: DecoderConfig
    mesh: Mesh
    graph: nnx.GraphDef
    abstract_state: TrainState
    init: Callable[[], TrainState]
    step: Callable
    _row_losses: Callable

    @property
    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, types and shardings of the batch of one step, split into microbatches."""
        training, length = self.config.training, self.config.data.sequence_length
        rows = (training.gradient_accumulation, _microbatch(self.config))
        sharding = NamedSharding(self.mesh, PartitionSpec(None, *partition_spec('batch')))
        tokens = jax.ShapeDtypeStruct((*rows, length), np.int32, sharding=sharding)
        return dict.fromkeys(('inputs', 'targets', 'segment_ids', 'positions'), tokens) | {
            'weights': jax.ShapeDtypeStruct(tokens.shape, np.float32, sharding=sharding),
            'example_ids': jax.ShapeDtypeStruct(rows, np.int32, sharding=sharding),
        }

    def compile_step(self) -> jax.stages.Compiled:
        """Compiles (state, placed batch) -> (state, metrics); the given state is donated."""
        return self.step.lower(self.abstract_state, self.abstract_batch).compile()

    def place_batch(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Makes the global microbatches [A, B, ...] from this process' rows of a batch."""
        rows = len(batch['inputs'])
        # Numbered within the step, alike for every number of processes.
        example_ids = np.arange(rows, dtype=np.int32) + rows * jax.process_index()
        accumulation = self.config.training.gradient_accumulation
        local = split_batch(batch | {'example_ids': example_ids}, accumulation)
        return {
            name: jax.make_array_from_process_local_data(
                abstract.sharding, local[name], abstract.shape
            )
            for name, abstract in self.abstract_batch.items()
        }

    def evaluate(
        self,
        state: TrainState,
        batches: Callable[[], Iterable[dict]],
        *,
        token_bytes: np.ndarray,
        draws: int,
    ) -> dict[str, float]:
        """Evaluates a state on global host batches; see `evaluation.perplexity.evaluate`.

        A run that keeps its permutations is evaluated under them, whatever the draws.
        """
        keys = draw_keys(draws) if self.config.training.fresh_permutations else [state.key]
        sharding = batch_sharding(self.mesh)

        def row_losses_of(batch, key):
            placed = {
                name: jax.make_array_from_callback(x.shape, sharding, x.__getitem__)
                for name, x in batch.items()
            }
            return jax.device_get(self._row_losses(state.params, placed, key))

        def numbered():
            for index, batch in enumerate(batches()):
                rows = len(batch['inputs'])
                yield batch | {'example_ids': np.arange(rows, dtype=np.int32) + rows * index}

        return evaluate(row_losses_of, numbered, token_bytes=token_bytes, keys=keys)


def build_program(config: ConfigDict, devices: Sequence[jax.Device] | None = None) -> Program:
    """Checks the model, mesh and batch of a configuration and prepares, but compiles, nothing.

    Args:
      config: the run's configuration.
      devices: those to run on, by default all.

    Raises:
      ValueError: if a field is out of range or sizes don't divide.
    """
    model_config = DecoderConfig.from_config_dict(config.model)
    _check_counts(config)
    mesh = make_mesh(**config.mesh, devices=_usable(devices, config))
    check_divisible(
        'The rows of a microbatch, training.batch_size / training.gradient_accumulation,',
        _microbatch(config),
        'batch',
        mesh,
    )
    _check_rows_of_processes(mesh, _microbatch(config))
    # On one device there is nothing to partition.
    model_mesh = mesh if mesh.size > 1 else None

    def create(key: jax.Array) -> Decoder:
        return Decoder(model_config, rngs=nnx.Rngs(key))

    def init_params(key):
        return nnx.to_pure_dict(nnx.state(create(key)))

    key = jax.random.key(config.seed)
    graph, _ = nnx.split(nnx.eval_shape(create, key))

    def forward(params, batch, key):
        output = nnx.merge(graph, params)(
            batch['inputs'],
            positions=batch['positions'],
            segment_ids=batch['segment_ids'],
            permutation_key=key,
            example_ids=batch['example_ids'],
            mesh=model_mesh,
        )
        return output.logits, output.gate_means

    steps = config.training.steps
    optimizer = make_optimizer(config.optimizer, steps)
    init = functools.partial(init_state, init_params=init_params, optimizer=optimizer)
    abstract_state = jax.eval_shape(init, key)
    replicated = NamedSharding(mesh, PartitionSpec())
    # The moments lie where their parameters do.
    shardings = parameter_shardings(abstract_state, mesh)
    step = functools.partial(
        train_step,
        forward=forward,
        optimizer=optimizer,
        schedule=learning_rate_schedule(config.optimizer, steps),
        fresh_permutations=config.training.fresh_permutations,
    )
    return Program(
        config=config,
        model_config=model_config,
        mesh=mesh,
        graph=graph,
        abstract_state=jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            abstract_state,
            shardings,
        ),
        init=functools.partial(jax.jit(init, out_shardings=shardings), key),
        step=jax.jit(step, out_shardings=(shardings, replicated), donate_argnums=0),
        _row_losses=jax.jit(
            functools.partial(row_losses, forward=forward), out_shardings=replicated
        ),
    )


def _microbatch(config: ConfigDict) -> int:
    return config.training.batch_size // config.training.gradient_accumulation


def _usable(devices: Sequence[jax.Device] | None, config: ConfigDict) -> list[jax.Device]:
    """The devices that an open data axis can use: each needs as many rows of a microbatch."""
    devices = list(jax.devices() if devices is None else devices)
    mesh, rows = config.mesh, _microbatch(config)
    others = mesh.fsdp * mesh.tensor * mesh.get('sequence', 1)
    if mesh.data != -1 or others < 1 or jax.process_count() > 1:
        return devices
    counts = range(len(devices) // others, 0, -1)
    count = next((c * others for c in counts if rows % (c * mesh.fsdp) == 0), len(devices))
    if count < len(devices):
        logging.warning(
            'Using %d of %d devices: more do not divide the %d rows of a microbatch.',
            count,
            len(devices),
            rows,
        )
    return devices[:count]


def _check_rows_of_processes(mesh: Mesh, rows: int) -> None:
    """Each process reads rows of its own, so the mesh has to give it those and no others."""
    processes = jax.process_count()
    if processes == 1:
        return
    own = rows // processes
    indices = batch_sharding(mesh).addressable_devices_indices_map((rows,)).values()
    found = sorted({(x.start or 0, rows if x.stop is None else x.stop) for (x,) in indices})
    first = own * jax.process_index()
    is_block = all(a[1] == b[0] for a, b in itertools.pairwise(found))
    if not is_block or (found[0][0], found[-1][1]) != (first, first + own):
        raise ValueError(
            f'The mesh {dict(mesh.shape)} splits a row, or shares it, between {processes} '
            'processes; expected mesh.data times mesh.fsdp to be a multiple of their number, and '
            'mesh.tensor and mesh.sequence to stay within one.'
        )


def _check_counts(config: ConfigDict) -> None:
    training = config.training
    least = dict.fromkeys(
        (
            'data.sequence_length',
            'training.steps',
            'training.batch_size',
            'training.gradient_accumulation',
            'training.log_every',
            'training.checkpoint_every',
            'training.keep_checkpoints',
            'evaluation.permutation_draws',
        ),
        1,
    ) | {'evaluation.batches': 0, 'evaluation.every': 0}
    fields = flatten(config)
    for name, smallest in least.items():
        if fields[name] < smallest:
            raise ValueError(f'{name} is {fields[name]}; expected {smallest} or more.')
    processes = jax.process_count()
    for name, parts in (
        ('training.gradient_accumulation', training.gradient_accumulation),
        ('the number of processes times training.gradient_accumulation',
         processes * training.gradient_accumulation),
    ):  # fmt: skip
        if training.batch_size % parts:
            raise ValueError(
                f'training.batch_size is {training.batch_size}; expected a multiple of {name} '
                f'= {parts}.'
            )
