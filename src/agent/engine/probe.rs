//! The means that an agent would have, without starting one.

use std::collections::BTreeSet;

use super::data_port;
use super::ucx_devices::NetDevice;
use super::ucx_settings;
use crate::agent::core::config::AgentConfig;
use crate::error::Result;
use crate::secret::Key;
use crate::ucx::{Library, LibraryInfo, MemoryKind, Resource, UnknownVariable};

/// The means that UCX gives an agent of certain settings in this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probe {
    /// The UCX in use.
    pub ucx: LibraryInfo,
    /// The transports and devices that it may use.
    pub resources: Vec<Resource>,
    /// The network devices of this host, and whether UCX uses each.
    pub devices: Vec<NetDevice>,
    /// Whether it can move memory of CUDA devices.
    pub moves_cuda: bool,
    /// Variables `UCX_*` of the environment that this UCX does not know.
    pub unknown_variables: Vec<UnknownVariable>,
    /// Files of other UCX that are loaded in this process.
    pub others: Vec<std::path::PathBuf>,
}

impl Probe {
    /// Makes the context that an agent of these settings would have, and looks at it. Opens UCX for the life of the
    /// process.
    ///
    /// # Errors
    /// As [`Agent::start`](crate::agent::Agent::start).
    pub fn of(config: &AgentConfig) -> Result<Probe> {
        config.validate()?;
        let is_keyed = Key::configured(config.key_file.as_deref())?.is_some();
        let ucx_settings::Opened { context, devices, .. } =
            ucx_settings::open(config, is_keyed, data_port::choose(config, &BTreeSet::new())?)?;
        Ok(Probe {
            ucx: context.library().info().clone(),
            resources: context.resources(),
            devices,
            moves_cuda: context.memory_types().contains(MemoryKind::Cuda),
            unknown_variables: context.unknown_variables(),
            others: Library::others(),
        })
    }
}
