//! Device memory that RDMA devices write: on some platforms work on the device may miss the bytes of a transfer that is over,
//! until they are flushed.

use crate::error::Result;
use crate::mem::cuda::PrimaryContext;

/// The devices that need it, of all whose memory is registered.
#[derive(Default)]
pub(crate) struct RdmaFlush {
    known: Vec<u32>,
    devices: Vec<PrimaryContext>,
}

impl RdmaFlush {
    /// Memory of a device was registered.
    ///
    /// # Errors
    /// What the driver says when it is asked about the device.
    pub(crate) fn add(&mut self, device: u32) -> Result<()> {
        if self.known.contains(&device) {
            return Ok(());
        }
        let context = PrimaryContext::retain(device)?;
        self.known.push(device);
        if context.needs_rdma_flush() {
            self.devices.push(context);
        }
        Ok(())
    }

    /// Waits until the devices see all that was written.
    ///
    /// # Errors
    /// What the driver says.
    pub(crate) fn flush(&self) -> Result<()> {
        self.devices.iter().try_for_each(PrimaryContext::flush_rdma_writes)
    }
}
