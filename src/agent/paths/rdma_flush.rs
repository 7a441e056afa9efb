//! Device memory that RDMA devices write: on some platforms work on the device may miss bytes that have arrived, until they
//! are flushed.

use crate::error::Result;
use crate::mem::cuda::{PrimaryContext, RdmaWrites};

/// The devices that need it, of all whose memory was registered.
#[derive(Default)]
pub(crate) struct RdmaFlush {
    known: Vec<u32>,
    devices: Vec<PrimaryContext>,
}

impl RdmaFlush {
    /// Memory of a device was registered. `agent` is the name for log lines.
    pub(crate) fn add(&mut self, agent: &str, device: u32) {
        if self.known.contains(&device) {
            return;
        }
        self.known.push(device);
        let found = PrimaryContext::retain(device).and_then(|context| match context.rdma_writes() {
            RdmaWrites::InOrder => Ok(None),
            // One that cannot be flushed now cannot be later.
            RdmaWrites::NeedFlush => context.flush_rdma_writes().map(|()| Some(context)),
        });
        match found {
            Ok(context) => self.devices.extend(context),
            Err(error) => log::warn!(
                "agent {agent}: CUDA device {device} may see late what RDMA devices write to its memory, and cannot be made to \
                 wait for it: {error}"
            ),
        }
    }

    /// Waits until the devices see all that was written.
    ///
    /// # Errors
    /// What the driver says of the first device that did not.
    pub(crate) fn flush(&self) -> Result<()> {
        let mut all = Ok(());
        for device in &self.devices {
            all = all.and(device.flush_rdma_writes());
        }
        all
    }
}
