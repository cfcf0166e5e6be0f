"""Flows and diffusion: paths between noise and data, training batches, fields, samplers and flow maps."""

from theodolite.flows.fields import Field, field_of
from theodolite.flows.interpolants import (
    LINEAR,
    TRIGONOMETRIC,
    VARIANCE_PRESERVING,
    Interpolant,
    Quantity,
    convert,
    find_interpolant,
)
from theodolite.flows.maps import FlowMap, map_batches, map_loss, sample_map
from theodolite.flows.mixture import GaussianMixture, three_gaussians
from theodolite.flows.sampling import sample
from theodolite.flows.training import noisy, velocity_loss

__all__ = [
    # paths between noise and data
    "LINEAR",
    "TRIGONOMETRIC",
    "VARIANCE_PRESERVING",
    "Interpolant",
    "Quantity",
    "convert",
    "find_interpolant",
    # training
    "noisy",
    "velocity_loss",
    # velocity fields
    "Field",
    "field_of",
    # samplers
    "sample",
    # flow maps
    "FlowMap",
    "map_batches",
    "map_loss",
    "sample_map",
    # data whose flow is known
    "GaussianMixture",
    "three_gaussians",
]
