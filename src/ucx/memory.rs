//! Memory registered with a context.

use std::fmt;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Arc;

use ucx_sys::{ucp_mem_attr_t, ucp_mem_h, ucp_mem_map_params_t};

use super::context::Context;
use super::envelope::{self, EnvelopeKind};
use super::memory_kind::MemoryKind;
use super::status::{Status, UcxError};

/// A registered range of memory. Unmapped when the last [`Arc`] goes, on whatever thread that is; operations
/// under way hold one each.
pub struct Memory {
    context: Arc<Context>,
    handle: ucp_mem_h,
    addr: usize,
    len: usize,
    kind: MemoryKind,
}

// SAFETY: the handle is used only with functions of the context, which is made for use from several threads;
// the range itself is only named here, never read or written by Rust code.
unsafe impl Send for Memory {}
// SAFETY: as for Send.
unsafe impl Sync for Memory {}

impl Context {
    /// Registers `len` bytes at the address `addr` for transfers in both directions, local and remote.
    ///
    /// UCX inspects the memory itself to find its kind. Where that is not `kind` the registration is refused:
    /// UCX taking device memory for host memory would crash in the first transfer.
    ///
    /// # Safety
    /// The range must be memory of this process that stays mapped, and may be read and written by UCX and by
    /// peers that got its rkey, until the last [`Arc`] of the result is dropped. Operations under way hold one.
    ///
    /// # Errors
    /// [`Status::INVALID_PARAM`] for an empty or wrapping range; [`Status::UNSUPPORTED`] when this UCX cannot
    /// move memory of that kind or finds another kind; UCX's own status when it cannot register.
    pub unsafe fn map(self: &Arc<Self>, addr: usize, len: usize, kind: MemoryKind) -> Result<Arc<Memory>, UcxError> {
        let range = || format!("{len} bytes of {kind} memory at {addr:#x}");
        if addr == 0 || len == 0 || addr.checked_add(len).is_none() {
            let detail = format!("{} cannot be registered: expected a length above 0 and an end below 2^64", range());
            return Err(UcxError::invalid("ucp_mem_map", detail));
        }
        let unsupported = |found: &str| {
            let detail = format!(
                "{}: {found}; {} moves these kinds: {}. Device memory needs a UCX with its device's support, such \
                 as the wheel kvferry-ucx, transports that include it (UCX_TLS), and CUDA's runtime library \
                 (libcudart), without which UCX takes it for host memory",
                range(),
                self.library().info(),
                self.memory_types()
            );
            UcxError::new("ucp_mem_map", Status::UNSUPPORTED, detail)
        };
        if !self.memory_types().contains(kind) {
            return Err(unsupported("this UCX cannot move it"));
        }
        // SAFETY: all-zero is valid for this C structure of integers and pointers.
        let mut params: ucp_mem_map_params_t = unsafe { MaybeUninit::zeroed().assume_init() };
        // The memory type is left out on purpose, so that UCX detects it.
        params.field_mask =
            u64::from(ucx_sys::UCP_MEM_MAP_PARAM_FIELD_ADDRESS.0 | ucx_sys::UCP_MEM_MAP_PARAM_FIELD_LENGTH.0);
        params.address = ptr::with_exposed_provenance_mut(addr);
        params.length = len;
        let api = self.library().api();
        let mut handle = ptr::null_mut();
        // SAFETY: the context is alive; the caller promises that the range is memory that stays valid as long
        // as the registration, which `Memory` ends when dropped.
        let status = unsafe { api.ucp_mem_map(self.handle(), &params, &mut handle) };
        Status::from_raw(status)
            .check("ucp_mem_map", || format!("{}; is the whole range mapped, readable and writable?", range()))?;
        let mut memory = Memory { context: Arc::clone(self), handle, addr, len, kind };
        memory.kind = memory.query_kind()?;
        if kind.may_be_seen_as(memory.kind) {
            Ok(Arc::new(memory))
        } else {
            Err(unsupported(&format!("UCX sees {} memory there", memory.kind)))
        }
    }
}

impl Memory {
    /// The first address.
    pub fn addr(&self) -> usize {
        self.addr
    }

    /// The length in bytes; never 0.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The kind that UCX found.
    pub fn kind(&self) -> MemoryKind {
        self.kind
    }

    /// The bytes that let a peer read and write this memory. They are its range, its kind and UCX's packed rkey, in a
    /// checked envelope. For [`Endpoint::unpack_rkey`](super::Endpoint::unpack_rkey) on the other side.
    ///
    /// # Errors
    /// UCX's status when it cannot pack.
    pub fn pack_rkey(&self) -> Result<Vec<u8>, UcxError> {
        let api = self.context.library().api();
        let (mut buffer, mut size) = (ptr::null_mut(), 0);
        // SAFETY: context and registration are alive; the results go into the two variables.
        let status = unsafe { api.ucp_rkey_pack(self.context.handle(), self.handle, &mut buffer, &mut size) };
        Status::from_raw(status).check("ucp_rkey_pack", || format!("{self:?}"))?;
        let mut payload = Vec::with_capacity(RKEY_PREFIX + size);
        payload.extend_from_slice(&(self.addr as u64).to_le_bytes());
        payload.extend_from_slice(&(self.len as u64).to_le_bytes());
        payload.extend_from_slice(&self.kind.code().to_le_bytes());
        // SAFETY: UCX returned a buffer of `size` bytes, alive until it is released below.
        payload.extend_from_slice(unsafe { std::slice::from_raw_parts(buffer.cast::<u8>(), size) });
        // SAFETY: the buffer of ucp_rkey_pack above, released once and not used again.
        unsafe { api.ucp_rkey_buffer_release(buffer) };
        envelope::seal(EnvelopeKind::Rkey, &payload)
    }

    /// The address of `len` bytes at `offset`, or an error when they leave the range.
    pub(super) fn slice(&self, op: &'static str, offset: usize, len: usize) -> Result<usize, UcxError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(self.addr + offset),
            _ => Err(UcxError::new(
                op,
                Status::OUT_OF_RANGE,
                format!("{len} bytes at local offset {offset} leave {self:?}"),
            )),
        }
    }

    pub(super) fn handle(&self) -> ucp_mem_h {
        self.handle
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    fn query_kind(&self) -> Result<MemoryKind, UcxError> {
        // SAFETY: all-zero is valid for this C structure of integers and pointers.
        let mut attr: ucp_mem_attr_t = unsafe { MaybeUninit::zeroed().assume_init() };
        attr.field_mask = u64::from(ucx_sys::UCP_MEM_ATTR_FIELD_MEM_TYPE.0);
        // SAFETY: the registration is alive, and UCX writes only the field in the mask.
        let status = unsafe { self.context.library().api().ucp_mem_query(self.handle, &mut attr) };
        Status::from_raw(status).check("ucp_mem_query", || format!("{self:?}"))?;
        Ok(MemoryKind::from_code(attr.mem_type.0))
    }
}

/// The length of base, length and kind before the packed rkey.
const RKEY_PREFIX: usize = 8 + 8 + 4;

/// The range of an exported rkey: base, length and kind of memory. UCX has no part in this.
///
/// # Errors
/// [`Status::MALFORMED`] when the bytes are not an exported rkey or are damaged.
pub fn rkey_range(bytes: &[u8]) -> Result<(u64, u64, MemoryKind), UcxError> {
    parse_rkey(bytes).map(|(base, len, kind, _)| (base, len, kind))
}

/// Parses an exported rkey: base, length, kind of memory, and UCX's packed rkey.
pub(super) fn parse_rkey(bytes: &[u8]) -> Result<(u64, u64, MemoryKind, &[u8]), UcxError> {
    let payload = envelope::open(EnvelopeKind::Rkey, bytes)?;
    let short = || UcxError::new("unpack rkey", Status::MALFORMED, "the rkey ends before UCX's part of it");
    let (prefix, packed) = payload.split_first_chunk::<RKEY_PREFIX>().ok_or_else(short)?;
    let [a0, a1, a2, a3, a4, a5, a6, a7, l0, l1, l2, l3, l4, l5, l6, l7, k0, k1, k2, k3] = *prefix;
    let base = u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]);
    let len = u64::from_le_bytes([l0, l1, l2, l3, l4, l5, l6, l7]);
    let kind = MemoryKind::from_code(u32::from_le_bytes([k0, k1, k2, k3]));
    if packed.is_empty() {
        return Err(short());
    }
    if len == 0 || base.checked_add(len).is_none() {
        let detail = format!("the rkey is for {len} bytes at {base:#x}, which is no range of memory");
        return Err(UcxError::new("unpack rkey", Status::MALFORMED, detail));
    }
    Ok((base, len, kind, packed))
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped by ucp_mem_map, unmapped once; no operation uses it, as each would hold an Arc.
        let status = unsafe { self.context.library().api().ucp_mem_unmap(self.context.handle(), self.handle) };
        let status = Status::from_raw(status);
        if !status.is_ok() {
            log::error!("ucp_mem_unmap of {self:?}: {status}");
        }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "the registered {} bytes of {} memory at {:#x}", self.len, self.kind, self.addr)
    }
}
