//! Device memory of other processes of this host, by CUDA's handles for that.
//!
//! A mapping keeps the memory that it shows alive: it stays until the owner has freed the memory and the mapping is gone. So
//! a peer that maps a region must unmap it when its owner deregisters it.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use cudarc::driver::sys;
use rustix::process::{ForeignRawFd, Pid, PidfdFlags, PidfdGetfdFlags, Resource};

use super::unmapper::{Queue, Unmapper};
use super::{Attribute, PrimaryContext, allocation, attribute, ok};
use crate::error::{Error, ErrorKind, Result};
use crate::mem::MemoryRange;
use crate::proto::wire::{DeviceHandle, DevicePiece, MemoryKind};

const BY_DESCRIPTOR: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
/// By a handle that the IMEX service passes on, on machines whose GPUs it connects. PyTorch gives memory such ones only where there
/// is one.
const BY_FABRIC: sys::CUmemAllocationHandleType = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC;
/// Bytes of such a handle.
const FABRIC_BYTES: usize = 64;

/// Descriptors that this process has exported.
static EXPORTED: AtomicUsize = AtomicUsize::new(0);

/// How other processes map a range, and what that takes here until it is dropped.
pub struct Exported {
    /// For their agents.
    pub handle: DeviceHandle,
    descriptors: Vec<OwnedFd>,
}

impl Drop for Exported {
    fn drop(&mut self) {
        EXPORTED.fetch_sub(self.descriptors.len(), Ordering::Relaxed);
    }
}

/// How other processes of this host can map the memory of `range`. `None` for memory that they cannot: of a pool, or made
/// without a handle that can be passed on.
///
/// # Errors
/// [`ErrorKind::Cuda`] when the driver knows of a handle and does not give it, [`ErrorKind::Exhausted`] when its pieces would
/// take more than a quarter of the descriptors that this process may have.
pub fn export(range: &MemoryRange) -> Result<Option<Exported>> {
    if !matches!(range.kind(), MemoryKind::Cuda { .. }) {
        return Ok(None);
    }
    if attribute::<u32>(range.addr(), Attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE)?.unwrap_or(0) == 0 {
        return export_pieces(range);
    }
    let base = attribute::<u64>(range.addr(), Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR)?.unwrap_or(0);
    let Some(offset) = range.addr().checked_sub(base).filter(|_| base > 0) else { return Ok(None) };
    let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
    // SAFETY: writes the handle; the address lies in an allocation of this process.
    ok("cuIpcGetMemHandle", unsafe { sys::cuIpcGetMemHandle(&mut handle, base) })?;
    let handle = handle.reserved.iter().map(|byte| byte.to_ne_bytes()[0]).collect();
    Ok(Some(Exported { handle: DeviceHandle { handle, offset, pieces: Vec::new() }, descriptors: Vec::new() }))
}

/// Memory of virtual memory management: PyTorch's expandable segments, for one.
fn export_pieces(range: &MemoryRange) -> Result<Option<Exported>> {
    let room = rustix::process::getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX) / 4;
    let handle = DeviceHandle { handle: Vec::new(), offset: 0, pieces: Vec::new() };
    let mut exported = Exported { handle, descriptors: Vec::new() };
    let mut at = range.addr();
    while at < range.end() {
        let types = attribute::<u64>(at, Attribute::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES)?.unwrap_or(0);
        let may_be = |kind: sys::CUmemAllocationHandleType| types & u64::from(kind.0) != 0;
        let (start, len) = allocation(at)?;
        if exported.handle.pieces.is_empty() {
            exported.handle.offset = at.saturating_sub(start);
        }
        // A descriptor needs no service.
        let piece = if may_be(BY_DESCRIPTOR) {
            if EXPORTED.load(Ordering::Relaxed) as u64 >= room {
                return Err(Error::new(
                    ErrorKind::Exhausted,
                    format!(
                        "its pieces take more than {room} descriptors, a quarter of what this process may have (ulimit -n)"
                    ),
                ));
            }
            let descriptor = export_descriptor(at)?;
            let fd = descriptor.as_raw_fd();
            exported.descriptors.push(descriptor);
            EXPORTED.fetch_add(1, Ordering::Relaxed);
            DevicePiece { fd, len, fabric: Vec::new() }
        } else if may_be(BY_FABRIC) {
            let mut fabric = [0u8; FABRIC_BYTES];
            // SAFETY: so long is a handle of this type.
            unsafe { export_piece(at, BY_FABRIC, fabric.as_mut_ptr().cast()) }?;
            DevicePiece { fd: -1, len, fabric: fabric.to_vec() }
        } else {
            return Ok(None);
        };
        exported.handle.pieces.push(piece);
        at = start.saturating_add(len).max(at + 1);
    }
    Ok(Some(exported))
}

/// Has the driver write the handle of the allocation at an address to `out`.
///
/// # Safety
/// There is room for a handle of this kind.
unsafe fn export_piece(addr: u64, kind: sys::CUmemAllocationHandleType, out: *mut c_void) -> Result<()> {
    let mut handle = 0;
    let at = std::ptr::without_provenance_mut::<c_void>(addr as usize);
    // SAFETY: writes a handle, which is released below; the driver only looks the address up.
    ok("cuMemRetainAllocationHandle", unsafe { sys::cuMemRetainAllocationHandle(&mut handle, at) })?;
    // SAFETY: this function's contract.
    let made = ok("cuMemExportToShareableHandle", unsafe { sys::cuMemExportToShareableHandle(out, handle, kind, 0) });
    // SAFETY: retained above; the mapping, and what was exported, keep the memory.
    let _ = unsafe { sys::cuMemRelease(handle) };
    made
}

fn export_descriptor(addr: u64) -> Result<OwnedFd> {
    let mut fd: c_int = -1;
    // SAFETY: a handle of this kind is a descriptor.
    unsafe { export_piece(addr, BY_DESCRIPTOR, (&raw mut fd).cast()) }?;
    // SAFETY: the driver has just made it for the caller.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // A child that inherited it would keep the memory.
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC)
        .map_err(|e| Error::new(ErrorKind::Io, format!("marking a descriptor of device memory: {e}")))?;
    Ok(fd)
}

/// True if a registered range's addresses are mapped to several allocations. Asked in the current context, which is
/// its device's; true also if the driver does not tell.
pub fn is_scattered(range: &MemoryRange) -> bool {
    matches!(range.kind(), MemoryKind::Cuda { .. })
        && !allocation(range.addr()).is_ok_and(|(start, len)| start.saturating_add(len) >= range.end())
}

/// A region of another agent's device memory, mapped for a device of this process.
pub struct Imported {
    _mapped: MappedMemory,
    addr: u64,
    len: u64,
}

/// A mapping that its drop undoes, by an [`Unmapper`] where it has a queue.
struct MappedMemory {
    context: Arc<PrimaryContext>,
    mapping: IpcMapping,
    queue: Option<Queue>,
    /// Gone when nothing is mapped any more.
    trace: Arc<()>,
}

/// The mappings to undo.
enum IpcMapping {
    /// Nothing: memory of this process, or not mapped.
    None,
    /// An allocation that was opened by its handle.
    Whole(u64),
    /// Reserved addresses, and the pieces mapped there: address, length.
    Pieces { base: u64, len: usize, pieces: Vec<(u64, usize)> },
}

impl Imported {
    /// Maps the `len` bytes of a region exported by process `pid`, for the device of `context`. When it is dropped,
    /// `unmapper` undoes that, and then drops `trace`.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`] for what is no handle, or of memory that ends before the region; [`ErrorKind::Unsupported`] when
    /// the devices do not reach one another; [`ErrorKind::Cuda`] when the driver maps it not for another reason: its owner is
    /// gone; [`ErrorKind::Io`] when the kernel does not pass the owner's descriptors on. What was mapped before is undone likewise.
    pub fn open(
        context: &Arc<PrimaryContext>,
        (unmapper, trace): (&Unmapper, Arc<()>),
        exported: &DeviceHandle,
        len: u64,
        pid: i32,
    ) -> Result<Imported> {
        let _entered = context.enter()?;
        let queue = Some(unmapper.queue());
        let mut mapped = MappedMemory { context: Arc::clone(context), mapping: IpcMapping::None, queue, trace };
        let (base, room) = match exported.pieces.as_slice() {
            [] => {
                let base = open_whole(&exported.handle)?;
                mapped.mapping = IpcMapping::Whole(base);
                let (start, size) = allocation(base)?;
                (base, start.saturating_add(size).saturating_sub(base))
            }
            pieces => map_pieces(&mut mapped, pieces, pid)?,
        };
        if exported.offset.checked_add(len).is_none_or(|end| end > room) {
            return Err(Error::corrupt(format!(
                "a handle of {room} bytes of device memory, of a region of {len} bytes that begins at {}",
                exported.offset
            )));
        }
        // No more than the end, which is an address.
        Ok(Imported { _mapped: mapped, addr: base + exported.offset, len })
    }

    /// A region of another agent in this process.
    ///
    /// # Errors
    /// Those of [`check_device`](super::check_device): it is not (any more) memory of device `device`.
    /// [`ErrorKind::Unsupported`] for memory of another device, which this one reaches only if somebody has enabled that.
    pub fn of_this_process(
        context: &Arc<PrimaryContext>,
        trace: Arc<()>,
        device: u32,
        addr: u64,
        len: u64,
    ) -> Result<Imported> {
        if device != context.ordinal() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("memory of device {device} of this process is not copied by device {}", context.ordinal()),
            ));
        }
        // SAFETY: the range is only looked up. Its owner has promised for it what is promised for any (`MemoryRange::new`).
        super::check_device(&unsafe { MemoryRange::new(addr, len, MemoryKind::Cuda { device }) }?, device)?;
        let mapped = MappedMemory { context: Arc::clone(context), mapping: IpcMapping::None, queue: None, trace };
        Ok(Imported { _mapped: mapped, addr, len })
    }

    /// The address here of `len` bytes at `offset` of the region.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfRange`] when they leave it.
    pub(super) fn slice(&self, offset: u64, len: u64) -> Result<u64> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(self.addr + offset),
            _ => Err(Error::new(
                ErrorKind::OutOfRange,
                format!("{len} bytes at offset {offset} leave a region of {} bytes", self.len),
            )),
        }
    }
}

impl Drop for MappedMemory {
    fn drop(&mut self) {
        let mapping = std::mem::replace(&mut self.mapping, IpcMapping::None);
        if matches!(mapping, IpcMapping::None) {
            return;
        }
        if let Some(queue) = self.queue.take() {
            let (context, trace) = (Arc::clone(&self.context), Arc::clone(&self.trace));
            // Comes back, and is undone here, where the thread has ended.
            let _ = queue.send(Some(Box::new(MappedMemory { context, mapping, queue: None, trace })));
            return;
        }
        let closed = self.context.enter().and_then(|_entered| match mapping {
            IpcMapping::None => Ok(()),
            // SAFETY: opened by `open`, closed once. Whoever copies from or to it holds it (`Copier`).
            IpcMapping::Whole(base) => ok("cuIpcCloseMemHandle", unsafe { sys::cuIpcCloseMemHandle(base) }),
            IpcMapping::Pieces { base, len, pieces } => unmap_pieces(base, len, &pieces),
        });
        if let Err(error) = closed {
            // At the end of the process the driver may be down already.
            log::debug!("unmapping device memory of another process: {error}");
        }
    }
}

/// As [`ok`], with [`ErrorKind::Unsupported`] where the driver says that a device does not reach the memory.
fn reached(call: &str, result: sys::CUresult) -> Result<()> {
    use sys::CUresult as R;
    ok(call, result).map_err(|error| match result {
        R::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED | R::CUDA_ERROR_INVALID_DEVICE | R::CUDA_ERROR_NOT_SUPPORTED => {
            Error::new(ErrorKind::Unsupported, error.message())
        }
        _ => error,
    })
}

fn open_whole(bytes: &[u8]) -> Result<u64> {
    let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
    if bytes.len() != handle.reserved.len() {
        return Err(Error::corrupt(format!(
            "a handle of device memory of {} bytes, expected {}",
            bytes.len(),
            handle.reserved.len()
        )));
    }
    for (to, from) in handle.reserved.iter_mut().zip(bytes) {
        *to = std::ffi::c_char::from_ne_bytes([*from]);
    }
    let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
    let mut base = 0;
    // SAFETY: writes an address; the driver judges the handle.
    reached("cuIpcOpenMemHandle", unsafe { sys::cuIpcOpenMemHandle_v2(&mut base, handle, flags) })?;
    Ok(base)
}

/// Maps pieces one behind the other. Returns where and how many bytes.
fn map_pieces(to: &mut MappedMemory, pieces: &[DevicePiece], pid: i32) -> Result<(u64, u64)> {
    let too_long = || Error::corrupt("pieces of device memory that do not fit the address space together");
    let total = pieces.iter().try_fold(0u64, |sum, piece| sum.checked_add(piece.len)).ok_or_else(too_long)?;
    let len = usize::try_from(total).map_err(|_| too_long())?;
    let refused = |what: &str, error: rustix::io::Errno| {
        Error::new(ErrorKind::Io, format!("{what} process {pid}, which exports device memory: {error}"))
    };
    let owner = Pid::from_raw(pid).ok_or_else(|| Error::corrupt("process 0 exports no memory"))?;
    let owner = rustix::process::pidfd_open(owner, PidfdFlags::empty()).map_err(|e| refused("opening", e))?;
    let import = |piece: &DevicePiece| {
        let mut handle = 0;
        if piece.fabric.is_empty() {
            let fd = rustix::process::pidfd_getfd(owner.as_fd(), piece.fd as ForeignRawFd, PidfdGetfdFlags::empty())
                .map_err(|e| refused("taking a descriptor of", e))?;
            let passed = std::ptr::without_provenance_mut::<c_void>(fd.as_raw_fd() as usize);
            // SAFETY: writes a handle; the descriptor is this process's.
            reached("cuMemImportFromShareableHandle", unsafe {
                sys::cuMemImportFromShareableHandle(&mut handle, passed, BY_DESCRIPTOR)
            })?;
        } else {
            let mut fabric: [u8; FABRIC_BYTES] = piece.fabric.as_slice().try_into().map_err(|_| {
                Error::corrupt(format!("a fabric handle of {} bytes, expected {FABRIC_BYTES}", piece.fabric.len()))
            })?;
            // SAFETY: writes a handle; the other is as long as one of this kind, and the driver judges it.
            reached("cuMemImportFromShareableHandle", unsafe {
                sys::cuMemImportFromShareableHandle(&mut handle, fabric.as_mut_ptr().cast(), BY_FABRIC)
            })?;
        }
        Ok::<_, Error>(handle)
    };
    let mut base = 0;
    // SAFETY: writes an address.
    ok("cuMemAddressReserve", unsafe { sys::cuMemAddressReserve(&mut base, len, 0, 0, 0) })?;
    let mut mapped: Vec<(u64, usize)> = Vec::new();
    let result = (|| {
        let mut at = base;
        for piece in pieces {
            let size = usize::try_from(piece.len).map_err(|_| too_long())?;
            let handle = import(piece)?;
            // SAFETY: the addresses were reserved for this and are mapped to nothing.
            let done = ok("cuMemMap", unsafe { sys::cuMemMap(at, size, 0, handle, 0) });
            // SAFETY: imported above; the mapping keeps the memory.
            let _ = unsafe { sys::cuMemRelease(handle) };
            done?;
            mapped.push((at, size));
            at += piece.len;
        }
        let location = sys::CUmemLocation {
            type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: c_int::try_from(to.context.ordinal()).unwrap_or(-1),
        };
        let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = sys::CUmemAccessDesc { location, flags };
        // SAFETY: all of these addresses are mapped.
        reached("cuMemSetAccess", unsafe { sys::cuMemSetAccess(base, len, &access, 1) })
    })();
    to.mapping = IpcMapping::Pieces { base, len, pieces: mapped };
    result.map(|()| (base, total))
}

fn unmap_pieces(base: u64, len: usize, pieces: &[(u64, usize)]) -> Result<()> {
    let mut result = Ok(());
    for (at, size) in pieces {
        // SAFETY: mapped by `map_pieces`, unmapped once. Whoever copies from or to it holds it (`Copier`).
        result = result.and(ok("cuMemUnmap", unsafe { sys::cuMemUnmap(*at, *size) }));
    }
    // SAFETY: reserved by `map_pieces`, with nothing mapped any more.
    result.and(ok("cuMemAddressFree", unsafe { sys::cuMemAddressFree(base, len) }))
}
