//! From a stated range to a UCX registration.

use std::sync::Arc;

use super::{MemoryRange, check, ucx_error};
use crate::error::{Error, Result};
use crate::proto::wire::MemoryKind;
use crate::ucx;

/// Checks `range` (see [`check`]) and registers it with UCX. UCX inspects the memory itself: a registration in which
/// UCX sees another kind of memory than was stated is refused. Returns also what the check does.
///
/// # Errors
/// Those of [`check`]; [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) when this UCX cannot move the kind of
/// memory or takes it for another; [`ErrorKind::Ucx`](crate::ErrorKind::Ucx) when it cannot register.
pub fn map(context: &Arc<ucx::Context>, range: &MemoryRange) -> Result<(Arc<ucx::Memory>, bool)> {
    let is_filled_by_kernel = check(range)?;
    let kind = match range.kind() {
        MemoryKind::Host => ucx::MemoryKind::Host,
        MemoryKind::Cuda { .. } => ucx::MemoryKind::Cuda,
    };
    let too_large = |_| Error::invalid(format!("{range} does not fit this platform's address space"));
    let addr = usize::try_from(range.addr()).map_err(too_large)?;
    let len = usize::try_from(range.len()).map_err(too_large)?;
    // SAFETY: whoever made the range promised (`MemoryRange::new`) that it stays mapped and may be read and written
    // until its deregistration has returned, and the agent releases the registration before that.
    let memory = unsafe { context.map(addr, len, kind) };
    let memory = memory.map_err(|e| ucx_error(e).context(format!("registering {range}")))?;
    Ok((memory, is_filled_by_kernel))
}
