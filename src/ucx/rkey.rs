//! A peer's registered memory, as seen through one endpoint.

use std::fmt;
use std::ptr;
use std::rc::Rc;

use ucx_sys::ucp_rkey_h;

use super::endpoint::EndpointCore;
use super::memory::{self, MemoryKind};
use super::status::{Status, UcxError};

/// The right to read and write one registered range of a peer's memory, over the endpoint that unpacked it.
///
/// Operations under way hold it. It keeps the worker alive, not the connection: after the endpoint was
/// closed it is useless and harmless.
pub struct Rkey {
    endpoint: Rc<EndpointCore>,
    handle: ucp_rkey_h,
    base: u64,
    len: u64,
    kind: MemoryKind,
}

impl Rkey {
    pub(super) fn unpack(endpoint: &Rc<EndpointCore>, bytes: &[u8]) -> Result<Rc<Self>, UcxError> {
        const OP: &str = "ucp_ep_rkey_unpack";
        let (base, len, kind, packed) = memory::parse_rkey(bytes)?;
        let ep = endpoint.open_handle(OP)?;
        let mut handle = ptr::null_mut();
        // SAFETY: the endpoint is open. UCX reads as many bytes as they themselves say, without knowing their
        // length: the envelope's checksum vouches that they are what a UCX packed.
        let status = unsafe { endpoint.api().ucp_ep_rkey_unpack(ep, packed.as_ptr().cast(), &mut handle) };
        Status::from_raw(status).check(OP, || {
            format!(
                "{len} bytes of {kind} memory at {base:#x} of {endpoint:?}; do both sides share a transport for it?"
            )
        })?;
        Ok(Rc::new(Self { endpoint: Rc::clone(endpoint), handle, base, len, kind }))
    }

    /// The first address, in the peer's address space.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// The length in bytes; never 0.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// The kind of the peer's memory.
    pub fn kind(&self) -> MemoryKind {
        self.kind
    }

    pub(super) fn handle(&self) -> ucp_rkey_h {
        self.handle
    }

    pub(super) fn endpoint(&self) -> &Rc<EndpointCore> {
        &self.endpoint
    }

    /// Refuses a range that leaves the peer's memory: UCX's emulation of one-sided operations over TCP does
    /// not check it, and the peer would crash.
    pub(super) fn check(&self, op: &'static str, addr: u64, len: usize) -> Result<(), UcxError> {
        let end = addr.checked_add(len as u64);
        match end {
            // base + len does not wrap: `parse_rkey` checked it.
            Some(end) if addr >= self.base && end <= self.base + self.len => Ok(()),
            _ => Err(UcxError::new(
                op,
                Status::OUT_OF_RANGE,
                format!("{len} bytes at the remote address {addr:#x} leave {self:?}"),
            )),
        }
    }
}

impl Drop for Rkey {
    fn drop(&mut self) {
        // SAFETY: unpacked by ucp_ep_rkey_unpack, destroyed once; operations that use it would hold an Rc. UCX
        // keeps rkeys per worker, and the endpoint's core keeps the worker, so a closed endpoint is no matter.
        unsafe { self.endpoint.api().ucp_rkey_destroy(self.handle) };
    }
}

impl fmt::Debug for Rkey {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "the peer's {} bytes of {} memory at {:#x}", self.len, self.kind, self.base)
    }
}
