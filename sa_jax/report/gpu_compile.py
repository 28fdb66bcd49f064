"""Compiles GPU programs for described cards, without a GPU, and reads the compiler's report.

JAX's CUDA plugin brings XLA's compiler, which takes a description of a card in place of one. Two
habits of it shape this module: its cache of kernels forgets which architecture they were made for,
and a bad kernel can end the process. So every card has processes of its own, and what one of them
was compiling when it ended is reported as failed, the rest compiled in the next.
"""

import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from sa_jax.report.collectives import Collective, collectives

PLUGIN = 'jax-cuda13-plugin'
_MARK = '@@ program'  # begins a program's part of standard error
_KIB, _MIB = 2**10, 2**20


@dataclasses.dataclass(frozen=True)
class Card:
    """What the compiler has to know of a card; from NVIDIA's data sheets and device queries.

    Attributes:
      kind: `jax.Device.device_kind`.
      capability: compute capability, major and minor.
      multiprocessors: their number.
      lanes: float32 units of a multiprocessor.
      clock: GHz.
      shared_memory: of a multiprocessor, bytes.
      shared_memory_limit: what one block of threads may ask for, bytes.
      l2_cache: bytes.
      memory: bytes.
      bandwidth: of the memory, bytes/s.
    """

    kind: str
    capability: tuple[int, int]
    multiprocessors: int
    lanes: int
    clock: float
    shared_memory: int
    shared_memory_limit: int
    l2_cache: int
    memory: int
    bandwidth: int

    def target_config(self) -> str:
        """The card as the text of XLA's GpuTargetConfigProto."""
        major, minor = self.capability
        device = {
            'threads_per_warp': 32,
            'threads_per_block_limit': 1024,
            'threads_per_core_limit': 2048,
            'registers_per_core_limit': 2**16,
            'registers_per_block_limit': 2**16,
            'block_dim_limit_x': 2**31 - 1,
            'block_dim_limit_y': 2**16 - 1,
            'block_dim_limit_z': 2**16 - 1,
            'core_count': self.multiprocessors,
            'fpus_per_core': self.lanes,
            'clock_rate_ghz': self.clock,
            'shared_memory_per_block': 48 * _KIB,
            'shared_memory_per_block_optin': self.shared_memory_limit,
            'shared_memory_per_core': self.shared_memory,
            'l2_cache_size': self.l2_cache,
            'device_memory_size': self.memory,
            'memory_bandwidth': self.bandwidth,
        }
        lines = [f'  {name}: {value}' for name, value in device.items()]
        lines.append(f'  cuda_compute_capability {{ major: {major} minor: {minor} }}')
        return '\n'.join(
            [
                'gpu_device_info {',
                *lines,
                '}',
                'platform_name: "CUDA"',
                'runtime_version { major: 13 }',
                'dnn_version_info { major: 9 minor: 12 }',
                f'device_description_str: "{self.kind}"',
            ]
        )


CARDS = {
    # The least shared memory of all from sm80 on.
    'a10': Card(
        kind='NVIDIA A10',
        capability=(8, 6),
        multiprocessors=72,
        lanes=128,
        clock=1.695,
        shared_memory=100 * _KIB,
        shared_memory_limit=99 * _KIB,
        l2_cache=6 * _MIB,
        memory=24_000_000_000,
        bandwidth=600_000_000_000,
    ),
    'a100': Card(
        kind='NVIDIA A100-SXM4-80GB',
        capability=(8, 0),
        multiprocessors=108,
        lanes=64,
        clock=1.41,
        shared_memory=164 * _KIB,
        shared_memory_limit=163 * _KIB,
        l2_cache=40 * _MIB,
        memory=85_050_000_000,
        bandwidth=2_039_000_000_000,
    ),
    'h200': Card(
        kind='NVIDIA H200',
        capability=(9, 0),
        multiprocessors=132,
        lanes=128,
        clock=1.98,
        shared_memory=228 * _KIB,
        shared_memory_limit=227 * _KIB,
        l2_cache=60 * _MIB,
        memory=150_750_000_000,
        bandwidth=4_800_000_000_000,
    ),
}


@dataclasses.dataclass(frozen=True)
class Program:
    """A function to compile, by name, since another process builds it.

    Attributes:
      name: in the report.
      builder: 'module:function'; the function returns what to compile and a tuple of its
        arguments, trees of `jax.ShapeDtypeStruct`s. Given a topology it takes the cards as the
        keyword `devices`, and the arguments have shardings.
      options: the builder's other keyword arguments, JSON.
      donated: the places of arguments whose memory the outputs may take.
      topology: slices × hosts × cards of a host, such as '2x1x8'; None for one card.
    """

    name: str
    builder: str
    options: dict
    donated: tuple[int, ...] = ()
    topology: str | None = None


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What the compiler says of one kernel; sizes in bytes.

    Attributes:
      name: the kernel's.
      registers: of a thread.
      spill_stores: written to memory for want of registers, by a thread.
      spill_loads: read back.
      threads: of a block.
      shared_memory: of a block.
    """

    name: str
    registers: int
    spill_stores: int
    spill_loads: int
    threads: int
    shared_memory: int


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program's report; sizes in bytes, of each card.

    Attributes:
      name: the program's.
      kernels: those it launches, in order.
      arguments: their size.
      outputs: their size.
      temporaries: memory beside arguments and outputs.
      aliased: of the outputs, what lies in donated arguments.
      collectives: what is sent between cards, the largest total first.
      error: why it could not be compiled, else None; then all the above are empty.
    """

    name: str
    kernels: tuple[Kernel, ...] = ()
    arguments: int = 0
    outputs: int = 0
    temporaries: int = 0
    aliased: int = 0
    collectives: tuple[Collective, ...] = ()
    error: str | None = None

    @property
    def peak(self) -> int:
        """All memory that the program needs, bytes."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


def missing() -> str | None:
    """Says what to install to compile for GPUs here; None if all is there."""
    version = importlib.metadata.version('jax')
    try:
        plugin = importlib.metadata.version(PLUGIN)
    except importlib.metadata.PackageNotFoundError:
        plugin = None
    if plugin != version:
        found = f'it is {plugin}' if plugin else 'it is not installed'
        return (
            f'{PLUGIN} has to be of the version of JAX, {version}: {found}. Install it with '
            f"pip install '{PLUGIN}=={version}', or with the extra aot: "
            "pip install -e '.[aot]'"
        )
    if _ptxas() is None:
        return (
            'there is no ptxas, which makes machine code of kernels: put the one of a CUDA 13 '
            "toolkit on PATH, or install the extra aot: pip install -e '.[aot]'"
        )
    return None


def _ptxas() -> str | None:
    """The path of ptxas, sought where XLA does: the wheel nvidia-cuda-nvcc, then PATH."""
    spec = importlib.util.find_spec('nvidia')
    for folder in spec.submodule_search_locations or () if spec else ():
        path = Path(folder, 'cu13', 'bin', 'ptxas')
        if path.exists():
            return str(path)
    return shutil.which('ptxas')


def ptxas_version() -> str:
    """The version of ptxas, of which registers and spills depend.

    Raises:
      RuntimeError: there is none (see `missing`).
    """
    path = _ptxas()
    if path is None:
        raise RuntimeError('there is no ptxas; sa_jax.report.gpu_compile.missing() says what to do')
    done = subprocess.run([path, '--version'], capture_output=True, text=True, check=True)
    return re.search(r'\bV(\d\S*)', done.stdout)[1]


def compile_for(
    card: Card,
    programs: Sequence[Program],
    *,
    on_compiled: Callable[[Compiled], None] = lambda _: None,
) -> list[Compiled]:
    """Compiles programs for a card, in processes of their own.

    Args:
      card: for example one of `CARDS`.
      programs: what to compile.
      on_compiled: called after each program.

    Returns:
      A report for each program, in order. A program that can't be compiled has its `error`.

    Raises:
      RuntimeError: something has to be installed first (see `missing`).
    """
    lack = missing()
    if lack is not None:
        raise RuntimeError(f'can compile nothing for {card.kind}: {lack}')
    reports = []
    while len(reports) < len(programs):
        # Each round takes up behind the program in which the last process ended.
        for report in _compile_in_process(card, programs[len(reports) :]):
            reports.append(report)
            on_compiled(report)
    return reports


def _compile_in_process(card, programs):
    """Yields the reports of one process: for all programs, or up to the one that ended it."""
    with tempfile.TemporaryDirectory() as folder:
        log_path = Path(folder, 'log')
        flags = (
            '--xla_dump_to=' + folder,
            '--xla_dump_hlo_module_re=program_',
            '--xla_gpu_enable_libnvjitlink=false',  # where it is installed, ptxas would not run
        )
        environment = os.environ | {
            'PYTHONPATH': os.pathsep.join(filter(None, sys.path)),  # the builders' modules
            'JAX_PLATFORMS': 'cpu',  # the plugin then asks for none of the CUDA libraries
            'JAX_DISABLE_MOST_OPTIMIZATIONS': '0',
            'JAX_ENABLE_COMPILATION_CACHE': '0',  # what is cached is not reported
            'XLA_FLAGS': ' '.join(flags),
            'TF_CPP_MIN_LOG_LEVEL': '0',
            'TF_CPP_VMODULE': 'subprocess_compilation=5',  # ptxas' report
        }
        request = {
            'target_config': card.target_config(),
            'programs': [dataclasses.asdict(program) for program in programs],
        }
        Path(folder, 'request.json').write_text(json.dumps(request))
        with log_path.open('w') as log:
            process = subprocess.Popen(
                [sys.executable, '-m', __name__, folder],
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
            )
        count = 0
        try:
            for line in process.stdout:
                if not line.startswith('{'):
                    continue
                answer = json.loads(line)
                part = log_path.read_text(errors='replace').split(_MARK)[count + 1]
                launches = Path(folder).glob(f'*program_{count}.*thunk_sequence.txt')
                launches = '\n'.join(path.read_text() for path in launches)
                kernels = () if answer['error'] else parse_kernels(part, launches)
                sent = answer.pop('collectives', ())
                answer['collectives'] = tuple(Collective(*x) for x in sent)
                yield Compiled(programs[count].name, kernels, **answer)
                count += 1
            process.wait()
        finally:
            process.kill()
            process.communicate()
        if count < len(programs):
            log = log_path.read_text(errors='replace')
            if _MARK not in log:
                raise RuntimeError(f'the compiling process did not start:\n{log[-2000:]}')
            end = log.rsplit(_MARK, 1)[1].strip()[-1000:]
            error = f'the compiler ended with exit code {process.returncode}: … {end}'
            yield Compiled(programs[count].name, error=error)


def parse_kernels(log: str, launches: str) -> tuple[Kernel, ...]:
    """Joins ptxas' report of a program with the program's launches.

    Args:
      log: standard error of the compilation, with what `ptxas -v` writes.
      launches: XLA's dump `*.thunk_sequence.txt`.

    Returns:
      The kernels that the program launches, each once, in the order of their first launch.

    Raises:
      ValueError: a kernel is launched of which ptxas said nothing.
    """
    compiled = {}
    # A kernel may have been tried in several forms under its name; the last one is kept.
    for block in re.split(r'Compiling entry function ', log)[1:]:
        name = re.match(r"'([^']+)'", block)
        spills = re.search(r'(\d+) bytes spill stores, (\d+) bytes spill loads', block)
        registers = re.search(r'Used (\d+) registers', block)
        if name and spills and registers:
            compiled[name[1]] = int(registers[1]), int(spills[1]), int(spills[2])
    launch = r'(\S+) grid: \[[^]]*\] threads: \[([^]]*)\]\s+shared_memory: (\d+) bytes'
    kernels = {}
    for name, threads, shared_memory in re.findall(launch, launches):
        if name not in compiled:
            raise ValueError(
                f'the program launches {name}, but ptxas reported only {sorted(compiled)}: its '
                'report has another form than expected, or the kernel came from a cache'
            )
        x, y, z = (int(number) for number in threads.split(','))
        kernels[name] = Kernel(name, *compiled[name], x * y * z, int(shared_memory))
    return tuple(kernels.values())


def _work(folder: str) -> None:
    """The compiling process: prints a line of JSON for each program of the request in `folder`."""
    import jax
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    request = json.loads(Path(folder, 'request.json').read_text())
    describe = functools.cache(
        lambda name: topologies.get_topology_desc(
            'described', 'cuda', target_config=request['target_config'], topology=name
        )
    )
    for index, program in enumerate(request['programs']):
        print(_MARK, program['name'], file=sys.stderr, flush=True)
        answer = {'error': None}
        try:
            module, builder = program['builder'].split(':')
            build = getattr(importlib.import_module(module), builder)
            topology = describe(program['topology'] or '1x1x1')
            first = topology.devices[0]
            cards = {'devices': topology.devices} if program['topology'] else {}
            function, arguments = build(**program['options'], **cards)

            def call(*arguments, function=function):
                return function(*arguments)

            call.__name__ = f'program_{index}'  # the name of its dump
            if not cards:
                alone = SingleDeviceSharding(first)
                arguments = jax.tree.map(
                    lambda x, alone=alone: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=alone),
                    arguments,
                )
            # What isn't used is in memory all the same.
            donated = tuple(program['donated'])
            jitted = jax.jit(call, donate_argnums=donated, keep_unused=True)
            with jax.default_device(first):
                compiled = jitted.lower(*arguments).compile()
            memory = compiled.memory_analysis()
            answer |= {
                'arguments': memory.argument_size_in_bytes,
                'outputs': memory.output_size_in_bytes,
                'temporaries': memory.temp_size_in_bytes,
                'aliased': memory.alias_size_in_bytes,
            }
            if cards:
                sent = collectives(compiled.as_text())
                answer['collectives'] = [dataclasses.astuple(x) for x in sent]
        except Exception as error:  # the compiler has many; whichever it is, it is the report
            answer['error'] = f'{type(error).__name__}: {error}'[:2000]
        print(json.dumps(answer), flush=True)


if __name__ == '__main__':
    _work(sys.argv[1])
