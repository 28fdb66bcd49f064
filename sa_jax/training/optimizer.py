"""AdamW with warm-up and a cosine or warm-up-stable-decay schedule."""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

SCHEDULES = ('cosine', 'wsd')

# Share of the run over which the 'wsd' schedule decays.
_WSD_DECAY = 0.2

# Norm scales, path gates and biases are not pulled towards zero: a gate that decays drifts back
# to one half, a norm scale that decays silences its layer.
_UNDECAYED = re.compile(r'(^|[/_])(norm|bias|path_gate)($|[/_])')


def parameter_name(path: tuple) -> str:
    """Returns the slash-separated name of a parameter from its pytree path."""
    return jax.tree_util.keystr(path, simple=True, separator='/')


def decay_mask(params) -> dict:
    """Tells for every parameter, by its name, whether weight decay applies to it."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not _UNDECAYED.search(parameter_name(path)), params
    )


def learning_rate_schedule(config: ConfigDict, steps: int) -> Callable:
    """Builds the learning rate as a function of the number of finished steps.

    The rate rises linearly over `warmup_steps`, reaching its peak with the last of them, then
    falls to `final_fraction` of the peak at `steps`: along a half cosine, or ('wsd') linearly
    over the last fifth of the run after a constant stretch.

    Args:
      config: the optimizer section: learning_rate, schedule, warmup_steps, final_fraction.
      steps: the optimizer steps of the whole run.

    Raises:
      ValueError: for an unknown schedule, or numbers out of range.
    """
    peak, final, warmup = config.learning_rate, config.final_fraction, config.warmup_steps
    if config.schedule not in SCHEDULES:
        raise ValueError(
            f'optimizer.schedule is {config.schedule!r}; expected one of {", ".join(SCHEDULES)}.'
        )
    if not 0 <= warmup < steps:
        raise ValueError(
            f'optimizer.warmup_steps is {warmup}; expected 0 or more, and fewer than '
            f'training.steps = {steps}: shorten the warm-up or lengthen the run.'
        )
    if peak <= 0 or not 0 <= final <= 1:
        raise ValueError(
            f'optimizer.learning_rate is {peak} and final_fraction {final}; expected a positive '
            'rate and a fraction between 0 and 1.'
        )
    decay_start = warmup
    if config.schedule == 'wsd':
        decay_start = max(warmup, round(steps * (1 - _WSD_DECAY)))

    def schedule(step):
        rise = jnp.minimum(1.0, (step + 1) / max(warmup, 1))
        progress = jnp.clip((step - decay_start) / (steps - decay_start), 0.0, 1.0)
        remaining = 1 - progress
        if config.schedule == 'cosine':
            remaining = 0.5 * (1 + jnp.cos(jnp.pi * progress))
        return peak * rise * (final + (1 - final) * remaining)

    return schedule


def make_optimizer(config: ConfigDict, steps: int) -> optax.GradientTransformation:
    """Builds clipping by the global norm followed by AdamW.

    Args:
      config: the optimizer section; a `clip_norm` of 0 means no clipping.
      steps: the optimizer steps of the whole run, for the schedule.
    """
    adamw = optax.adamw(
        learning_rate_schedule(config, steps),
        b1=config.beta1,
        b2=config.beta2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=decay_mask,
    )
    if config.clip_norm:
        return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)
    return adamw
