"""Settings: which way a tensor's bytes go, in which dtype, to whom, and who said so.

The only part of the library that reads the environment. Values and pure functions, but for :func:`read_environment`
and :func:`load_config`, which read from outside; every other function can be given what they return.
"""

from __future__ import annotations

from .arguments import add_transport_args, transport_from_args
from .dtype import ResolvedDtype, wire_dtype, wire_dtype_in
from .environment import Environment, default_num_threads, read_environment, warn_once
from .mode import TransportMode, parse_mode
from .numbers import LONGEST_S, parse_count, parse_min_bytes, parse_seconds, parse_size
from .own_variables import OWN_NAMES, read_own_variables
from .prefixes import ACCEPT_PREFIXES, check_accepted, parse_prefixes
from .router import RouterConfig, transport_from_dict, worker_from_dict
from .smg_variables import MODALITIES, SMG_NAMES
from .transport import DEFAULT_PROBE_MAX_AGE_S, DEFAULT_SHM_MIN_BYTES, ResolvedTransport, TransportConfig
from .worker import ENDPOINT_LABEL, ENGINES, NAMESPACE_LABEL, UID_LABEL, Role, WorkerSpec
from .yaml_file import load_config

__all__ = [
    "ACCEPT_PREFIXES",
    "DEFAULT_PROBE_MAX_AGE_S",
    "DEFAULT_SHM_MIN_BYTES",
    "ENDPOINT_LABEL",
    "ENGINES",
    "LONGEST_S",
    "MODALITIES",
    "NAMESPACE_LABEL",
    "OWN_NAMES",
    "SMG_NAMES",
    "UID_LABEL",
    "Environment",
    "ResolvedDtype",
    "ResolvedTransport",
    "Role",
    "RouterConfig",
    "TransportConfig",
    "TransportMode",
    "WorkerSpec",
    "add_transport_args",
    "check_accepted",
    "default_num_threads",
    "load_config",
    "parse_count",
    "parse_min_bytes",
    "parse_mode",
    "parse_prefixes",
    "parse_seconds",
    "parse_size",
    "read_environment",
    "read_own_variables",
    "transport_from_args",
    "transport_from_dict",
    "warn_once",
    "wire_dtype",
    "wire_dtype_in",
    "worker_from_dict",
]
