"""metrics.jsonl, throughput and MFU."""

import json
import subprocess
import sys

import jax
import pytest

from sa_jax.training import metrics
from sa_jax.training.metrics import (
    MetricsWriter,
    Throughput,
    flatten_scalars,
    peak_flops,
    read_metrics,
    truncate_metrics,
)


def write_lines(path, steps, rest=''):
    path.write_text(''.join(json.dumps({'step': s, 'loss': s / 7}) + '\n' for s in steps) + rest)


def test_truncation_drops_later_steps_and_torn_lines(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    write_lines(path, [2, 4, 6, 8], rest='{"step": 10, "lo')
    kept = path.read_text().splitlines()[:2]
    truncate_metrics(path, 5)
    assert path.read_text().splitlines() == kept
    truncate_metrics(path, 0)
    assert read_metrics(path) == []


def test_truncation_of_nothing(tmp_path):
    truncate_metrics(tmp_path / 'metrics.jsonl', 3)
    assert read_metrics(tmp_path / 'metrics.jsonl') == []


def test_writer_continues_behind_the_restored_step(tmp_path):
    write_lines(tmp_path / 'metrics.jsonl', [1, 2, 3])
    writer = MetricsWriter(tmp_path, step=2)
    writer.write({'step': 3, 'loss': 0.5, 'gates': {'0_full': [0.1, 0.2]}})
    writer.close()
    records = read_metrics(tmp_path / 'metrics.jsonl')
    assert [record['step'] for record in records] == [1, 2, 3]
    assert records[-1]['loss'] == 0.5
    assert list((tmp_path / 'tensorboard').iterdir())


def test_pytorch_is_not_imported():
    code = 'import sys, sa_jax.training.metrics; sys.exit("torch" in sys.modules)'
    subprocess.run([sys.executable, '-c', code], check=True)


def test_floats_survive_the_file(tmp_path):
    writer = MetricsWriter(tmp_path, step=0)
    writer.write({'step': 1, 'loss': 0.1 + 0.2})
    writer.close()
    assert read_metrics(tmp_path / 'metrics.jsonl')[0]['loss'] == 0.1 + 0.2


def test_flatten_scalars():
    record = {'step': 1, 'loss': 2.0, 'gates': {'a': [3.0, 4.0]}}
    assert flatten_scalars(record) == {'loss': 2.0, 'gates/a/0': 3.0, 'gates/a/1': 4.0}


def test_wandb_must_be_there_if_asked_for(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'wandb', None)
    with pytest.raises(ModuleNotFoundError, match='pip install wandb'):
        MetricsWriter(tmp_path, step=0, wandb_project='project')


class Device:
    def __init__(self, device_kind):
        self.device_kind = device_kind


@pytest.mark.parametrize(
    ('kind', 'peak'),
    [
        ('NVIDIA H200', 989e12),
        ('NVIDIA H100 PCIe', 756e12),
        ('NVIDIA H100 80GB HBM3', 989e12),
        ('NVIDIA A100-SXM4-80GB', 312e12),
        ('NVIDIA L40S', 362e12),
        ('NVIDIA L4', 121e12),
        ('TPU v5 lite', 197e12),
        ('cpu', None),
    ],
)
def test_peak_flops(kind, peak):
    assert peak_flops(Device(kind)) == peak


def test_mfu_is_the_share_of_all_devices_peak(monkeypatch):
    # Waited from 0.5 to 0.6, and from 0.8 on with a step in hand; steps ended at 0.75 and 2.
    clock = iter([0.0, 0.0, 0.5, 0.6, 0.75, 0.8, 2.0, 2.0, 2.0])
    monkeypatch.setattr(metrics.time, 'perf_counter', lambda: next(clock))
    throughput = Throughput(flops_per_token=1e9, devices=[Device('NVIDIA A100')] * 2)
    throughput.restart()
    with throughput.waiting(lambda: False):
        pass
    throughput.add(300_000)
    with throughput.waiting(lambda: True):
        pass
    throughput.add(12_000)
    assert throughput.read() == {
        'tokens_per_s': 156_000,
        'mfu': 0.25,
        'step_seconds': {'median': 1.0, 'most': 1.25},
        'input_wait': pytest.approx(0.05),
    }


def test_mfu_is_left_out_where_the_peak_is_unknown():
    throughput = Throughput(flops_per_token=1e9, devices=jax.devices()[:1])
    throughput.add(1)
    assert 'mfu' not in throughput.read()
