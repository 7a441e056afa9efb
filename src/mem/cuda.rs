//! CUDA memory, through the driver library that is opened at run time. Everything here works, with clear errors, on a
//! machine that has no CUDA driver.

pub mod batch;
pub mod copier;
pub mod ipc;
pub mod staging;
pub mod unmapper;

use std::ffi::{CStr, c_int, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys;
use sys::CUpointer_attribute as Attribute;

use super::MemoryRange;
use crate::error::{Error, ErrorKind, Result};

const HOW_TO_GET: &str = "install the NVIDIA driver, or make libcuda.so.1 visible to this process (in a container: the \
                          NVIDIA container runtime), or register host memory instead";

/// The kind of memory at an address, as the driver says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pointer {
    /// The driver does not know it: ordinary process memory, or not memory at all.
    Unknown,
    /// Host memory that the driver has pinned (`cuMemHostAlloc`, `cuMemHostRegister`).
    PinnedHost,
    /// Managed memory, which moves between host and devices.
    Managed,
    /// Device memory.
    Device {
        /// The device ordinal.
        device: u32,
        /// Start of the allocation that holds the address.
        base: u64,
        /// Length of that allocation in bytes.
        len: u64,
    },
}

/// Visibility of RDMA writes: does work on a device see them when they are done?
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RdmaWrites {
    /// It does.
    InOrder,
    /// Only after a flush.
    NeedFlush,
}

/// A device's primary context, held until drop. The runtime API, PyTorch and UCX all use it, so retaining it keeps
/// the registered memory's context alive but creates nothing beside theirs.
pub struct PrimaryContext {
    device: sys::CUdevice,
    ordinal: u32,
    raw: sys::CUcontext,
}

// SAFETY: a CUcontext is a handle that any thread may make current or release; the driver locks for itself.
unsafe impl Send for PrimaryContext {}
// SAFETY: as above, and `&self` only reads the handle.
unsafe impl Sync for PrimaryContext {}

/// Turns a driver result into an error that names the call.
pub(super) fn ok(call: &str, result: sys::CUresult) -> Result<()> {
    if result == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text: *const std::ffi::c_char = std::ptr::null();
    // SAFETY: writes a pointer to a static string, or null for a code that it does not know.
    let named = unsafe { sys::cuGetErrorString(result, &mut text) };
    let text = if named == sys::CUresult::CUDA_SUCCESS && !text.is_null() {
        // SAFETY: the driver's static, NUL-terminated string.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    } else {
        "unknown error".to_owned()
    };
    Err(Error::new(ErrorKind::Cuda, format!("{call}: {text} (CUDA error {})", result as u32)))
}

/// True if the driver would not do what it was asked, which says nothing of what the device has under way: another thread records a
/// CUDA graph, or the process may not ask this.
pub(super) fn is_refusal(result: sys::CUresult) -> bool {
    use sys::CUresult as R;
    matches!(
        result,
        R::CUDA_ERROR_NOT_PERMITTED
            | R::CUDA_ERROR_NOT_SUPPORTED
            | R::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
            | R::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
            | R::CUDA_ERROR_STREAM_CAPTURE_MERGE
            | R::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
            | R::CUDA_ERROR_STREAM_CAPTURE_UNJOINED
            | R::CUDA_ERROR_STREAM_CAPTURE_ISOLATION
            | R::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
            | R::CUDA_ERROR_CAPTURED_EVENT
            | R::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD
    )
}

/// Lets this thread call the driver while another thread records a CUDA graph. Else both would fail: the mode of a
/// capture is one for all threads unless they say that they have nothing to do with it. Does nothing where there is
/// no driver, or none in use yet.
pub fn stay_out_of_captures() {
    // SAFETY: as in `driver`.
    if !unsafe { sys::is_culib_present() } {
        return;
    }
    /// CUDA 10.1, the first with the function, without which cudarc would panic.
    const FIRST: c_int = 10_010;
    let mut version: c_int = 0;
    // SAFETY: writes one number.
    let told = unsafe { sys::cuDriverGetVersion(&mut version) };
    if told != sys::CUresult::CUDA_SUCCESS || version < FIRST {
        return;
    }
    let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: exchanges a number of the calling thread.
    let exchanged = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
    if let Err(error) = ok("cuThreadExchangeStreamCaptureMode", exchanged) {
        log::debug!("CUDA graphs that are recorded in this process may fail: {error}");
    }
}

/// Opens the driver and initializes it, once; later calls return the first outcome.
fn driver() -> Result<()> {
    static OUTCOME: OnceLock<Result<()>> = OnceLock::new();
    OUTCOME
        .get_or_init(|| {
            // SAFETY: opens the driver library under its usual names and closes it again; its constructors have no
            // preconditions. cudarc panics where the library is absent, so this is asked first.
            if !unsafe { sys::is_culib_present() } {
                return Err(Error::new(ErrorKind::Cuda, format!("no CUDA driver was found: {HOW_TO_GET}")));
            }
            // SAFETY: any thread may initialize the driver, any number of times.
            ok("cuInit", unsafe { sys::cuInit(0) })
        })
        .clone()
}

/// The number of CUDA devices of this process. An error says why where there is no driver.
pub fn device_count() -> Result<u32> {
    driver()?;
    let mut count: c_int = 0;
    // SAFETY: writes one integer.
    ok("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&mut count) })?;
    Ok(u32::try_from(count).unwrap_or(0))
}

/// True if a driver and at least one device are there.
pub fn available() -> bool {
    device_count().is_ok_and(|count| count > 0)
}

/// Reads one attribute of the pointer `addr`; `None` where the driver does not know the pointer.
fn attribute<T: Copy + Default>(addr: u64, which: Attribute) -> Result<Option<T>> {
    let mut value = T::default();
    // SAFETY: `T` is the type that the driver's documentation states for the attribute (callers below), so the
    // driver writes within `value`; any address may be asked about.
    let result = unsafe { sys::cuPointerGetAttribute((&raw mut value).cast::<c_void>(), which, addr) };
    match result {
        sys::CUresult::CUDA_ERROR_INVALID_VALUE => Ok(None),
        other => ok("cuPointerGetAttribute", other).map(|()| Some(value)),
    }
}

/// Asks the driver about `addr`. Without a driver every address is [`Pointer::Unknown`].
pub fn pointer(addr: u64) -> Result<Pointer> {
    if !available() {
        return Ok(Pointer::Unknown);
    }
    let Some(kind) = attribute::<u32>(addr, Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE)? else {
        return Ok(Pointer::Unknown);
    };
    if attribute::<u32>(addr, Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED)?.unwrap_or(0) != 0 {
        return Ok(Pointer::Managed);
    }
    if kind == sys::CUmemorytype::CU_MEMORYTYPE_HOST as u32 {
        return Ok(Pointer::PinnedHost);
    }
    if kind != sys::CUmemorytype::CU_MEMORYTYPE_DEVICE as u32 {
        return Ok(Pointer::Unknown);
    }
    let ordinal = attribute::<c_int>(addr, Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)?.unwrap_or(-1);
    let Ok(device) = u32::try_from(ordinal) else {
        return Err(Error::new(ErrorKind::Cuda, format!("the driver gives {addr:#x} the device ordinal {ordinal}")));
    };
    // These two need no current context, unlike cuMemGetAddressRange.
    let base = attribute::<u64>(addr, Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR)?.unwrap_or(addr);
    let len = attribute::<usize>(addr, Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE)?.unwrap_or(0);
    Ok(Pointer::Device { device, base, len: len as u64 })
}

/// Refuses a range that was called host memory and is not, by either end.
pub fn check_not_device(range: &MemoryRange) -> Result<()> {
    for addr in [range.addr(), range.end().saturating_sub(1)] {
        match pointer(addr)? {
            Pointer::Unknown | Pointer::PinnedHost => {}
            Pointer::Managed => return Err(managed(range)),
            Pointer::Device { device, .. } => {
                return Err(Error::invalid(format!(
                    "{range} is not host memory but memory of CUDA device {device}; register it as CUDA memory of that \
                     device"
                )));
            }
        }
    }
    Ok(())
}

/// Refuses a range that is not memory of CUDA device `device` from end to end. It may be of one allocation, or of
/// several that are mapped one behind the other.
pub fn check_device(range: &MemoryRange, device: u32) -> Result<()> {
    let count = device_count().map_err(|e| e.context(format!("{range} cannot be registered")))?;
    if device >= count {
        return Err(Error::invalid(format!(
            "CUDA device {device} was named, this process sees {count} device(s), numbered from 0 \
             (CUDA_VISIBLE_DEVICES decides which)"
        )));
    }
    match pointer(range.addr())? {
        Pointer::Unknown => Err(Error::invalid(format!(
            "the CUDA driver does not know {range}: it is not device memory, or was freed; register ordinary memory as \
             host memory"
        ))),
        Pointer::PinnedHost => {
            Err(Error::invalid(format!("{range} is pinned host memory; register it as host memory")))
        }
        Pointer::Managed => Err(managed(range)),
        Pointer::Device { device: actual, .. } if actual != device => Err(Error::invalid(format!(
            "{range} belongs to CUDA device {actual}, not {device}; register it with its own device"
        ))),
        Pointer::Device { base, len, .. } if range.end() > base.saturating_add(len) => Err(Error::new(
            ErrorKind::OutOfRange,
            format!(
                "{range} ends {} bytes after its allocation, which is {base:#x}+{len}; lengths are in bytes",
                range.end().saturating_sub(base.saturating_add(len))
            ),
        )),
        Pointer::Device { .. } => check_mapped(range, device),
    }
}

/// Refuses a range with holes, and pieces of other devices: of memory of virtual memory management the driver calls all that is
/// reserved one range, and a kernel that touches what is not mapped ends the context, which is the engine's too.
fn check_mapped(range: &MemoryRange, device: u32) -> Result<()> {
    if attribute::<u32>(range.addr(), Attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE)?.unwrap_or(0) != 0 {
        return Ok(());
    }
    let context = PrimaryContext::retain(device)?;
    let _entered = context.enter()?;
    let mut at = range.addr();
    while at < range.end() {
        let is_mapped = attribute::<u32>(at, Attribute::CU_POINTER_ATTRIBUTE_MAPPED)?.unwrap_or(0) != 0;
        match pointer(at)? {
            Pointer::Device { device: actual, .. } if is_mapped && actual == device => {}
            Pointer::Device { device: actual, .. } if is_mapped => {
                return Err(Error::invalid(format!(
                    "{range} has memory of CUDA device {actual} at {at:#x}; register what is of one device"
                )));
            }
            _ => {
                return Err(Error::new(
                    ErrorKind::OutOfRange,
                    format!("nothing is mapped at {at:#x}, {} bytes after the beginning of {range}", at - range.addr()),
                ));
            }
        }
        let (start, len) = allocation(at)?;
        at = start.saturating_add(len).max(at + 1);
    }
    Ok(())
}

/// Start and length of the allocation at an address, in the current context.
fn allocation(addr: u64) -> Result<(u64, u64)> {
    let (mut start, mut len) = (0, 0);
    // SAFETY: writes two numbers.
    ok("cuMemGetAddressRange", unsafe { sys::cuMemGetAddressRange_v2(&mut start, &mut len, addr) })?;
    Ok((start, len as u64))
}

fn managed(range: &MemoryRange) -> Error {
    Error::new(
        ErrorKind::Unsupported,
        format!("{range} is CUDA managed memory, which can move during a transfer; use cuMemAlloc/cudaMalloc memory"),
    )
}

impl PrimaryContext {
    /// Retains the primary context of device `ordinal`. Creates it if this process has not used the device yet.
    pub fn retain(ordinal: u32) -> Result<Self> {
        driver()?;
        let mut device: sys::CUdevice = 0;
        let index = c_int::try_from(ordinal).map_err(|_| Error::invalid(format!("no CUDA device {ordinal}")))?;
        // SAFETY: writes one handle; an index out of range is an error result.
        ok("cuDeviceGet", unsafe { sys::cuDeviceGet(&mut device, index) })
            .map_err(|e| e.context(format!("CUDA device {ordinal}")))?;
        let mut raw: sys::CUcontext = std::ptr::null_mut();
        // SAFETY: writes one handle; `device` is valid.
        ok("cuDevicePrimaryCtxRetain", unsafe { sys::cuDevicePrimaryCtxRetain(&mut raw, device) })
            .map_err(|e| e.context(format!("CUDA device {ordinal}")))?;
        Ok(PrimaryContext { device, ordinal, raw })
    }

    /// The device's ordinal.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    fn attribute(&self, which: sys::CUdevice_attribute) -> Result<u32> {
        let mut value: c_int = 0;
        // SAFETY: writes one integer; the device is valid.
        ok("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&mut value, which, self.device) })?;
        Ok(u32::try_from(value).unwrap_or(0))
    }

    /// How many processors (SMs) the device has.
    pub fn processors(&self) -> Result<u32> {
        self.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
    }

    /// Tells if work on the device sees RDMA writes to its memory. Those that GPUDirect RDMA does not reach,
    /// or whose driver does not know the question, count as in order.
    pub fn rdma_writes(&self) -> RdmaWrites {
        use sys::CUdevice_attribute as Of;
        let reached = self.attribute(Of::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED).unwrap_or(0) != 0;
        let owner = sys::CUGPUDirectRDMAWritesOrdering::CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER as u32;
        let order = self.attribute(Of::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING).unwrap_or(owner);
        if reached && order < owner { RdmaWrites::NeedFlush } else { RdmaWrites::InOrder }
    }

    /// Waits until the device sees the finished writes of RDMA devices. Takes some microseconds. For devices of which
    /// [`PrimaryContext::rdma_writes`] says that they need it: their drivers have the function.
    ///
    /// # Errors
    /// The driver's errors, and [`ErrorKind::Unsupported`] where it cannot flush from the host.
    pub fn flush_rdma_writes(&self) -> Result<()> {
        use sys::CUflushGPUDirectRDMAWritesScope_enum as Scope;
        use sys::CUflushGPUDirectRDMAWritesTarget_enum as Target;
        let options =
            self.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS)?;
        if options & sys::CUflushGPUDirectRDMAWritesOptions::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST as u32 == 0 {
            return Err(Error::new(ErrorKind::Unsupported, "the driver does not flush RDMA writes from the host"));
        }
        let _entered = self.enter()?;
        let target = Target::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX;
        // SAFETY: takes two numbers; a context is current.
        ok("cuFlushGPUDirectRDMAWrites", unsafe {
            sys::cuFlushGPUDirectRDMAWrites(target, Scope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER)
        })
    }

    /// Makes the context the calling thread's current one and leaves it so. For a thread that has nothing to do with
    /// CUDA graphs that others record meanwhile.
    pub fn make_current(&self) -> Result<()> {
        stay_out_of_captures();
        // SAFETY: the context is retained for as long as `self` lives. A thread that keeps it current after that gets
        // errors from the driver, not undefined behaviour.
        ok("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.raw) })
    }

    /// Makes the context the calling thread's current one until the returned guard is dropped.
    pub fn enter(&self) -> Result<Entered<'_>> {
        // SAFETY: the context is retained while the guard borrows `self`.
        ok("cuCtxPushCurrent", unsafe { sys::cuCtxPushCurrent_v2(self.raw) })?;
        Ok(Entered { _context: self })
    }
}

impl Drop for PrimaryContext {
    fn drop(&mut self) {
        // SAFETY: releases the retention that `retain` took, once. At process exit the driver may already be down; it
        // then returns an error, which changes nothing.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// While it lives, its context is the thread's current one.
pub struct Entered<'a> {
    _context: &'a PrimaryContext,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut popped: sys::CUcontext = std::ptr::null_mut();
        // SAFETY: pops what `enter` pushed on this thread; writes one handle.
        let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut popped) };
    }
}

/// Device memory of tests.
#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod test_memory {
    use super::*;
    use crate::proto::wire::MemoryKind;

    /// Device 0, for as long as the process lives.
    fn enter() {
        static CONTEXT: OnceLock<PrimaryContext> = OnceLock::new();
        CONTEXT.get_or_init(|| PrimaryContext::retain(0).unwrap()).make_current().unwrap();
    }

    /// An allocation that is never freed, with these bytes; `None`, which the test says, where there is no device and
    /// `KVFERRY_REQUIRE` asks for none.
    pub(crate) fn leaked(bytes: &[u8]) -> Option<MemoryRange> {
        if !available() {
            let required = std::env::var("KVFERRY_REQUIRE").unwrap_or_default();
            assert!(!required.split(',').any(|word| word == "cuda"), "KVFERRY_REQUIRE names cuda, and there is none");
            eprintln!("SKIPPED: no CUDA device");
            return None;
        }
        enter();
        let mut addr = 0;
        // SAFETY: writes an address.
        ok("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&mut addr, bytes.len()) }).unwrap();
        // SAFETY: it is never freed, and the device alone reads and writes it.
        let range = unsafe { MemoryRange::new(addr, bytes.len() as u64, MemoryKind::Cuda { device: 0 }) }.unwrap();
        put(&range, bytes);
        Some(range)
    }

    /// Replaces all bytes.
    pub(crate) fn put(range: &MemoryRange, bytes: &[u8]) {
        assert_eq!(bytes.len() as u64, range.len());
        enter();
        // SAFETY: the range has as many bytes.
        ok("cuMemcpyHtoD", unsafe { sys::cuMemcpyHtoD_v2(range.addr(), bytes.as_ptr().cast(), bytes.len()) }).unwrap();
        // SAFETY: waits, since a copy from memory that is not pinned may still be under way.
        ok("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() }).unwrap();
    }

    /// A copy of all bytes.
    pub(crate) fn get(range: &MemoryRange) -> Vec<u8> {
        enter();
        let mut bytes = vec![0; usize::try_from(range.len()).unwrap()];
        // SAFETY: the range has as many bytes.
        ok("cuMemcpyDtoH", unsafe { sys::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), range.addr(), bytes.len()) })
            .unwrap();
        bytes
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::proto::wire::MemoryKind;

    #[test]
    fn without_a_driver_everything_is_an_error_and_nothing_a_panic() {
        if available() {
            println!("SKIPPED: this machine has a CUDA device, so its absence cannot be tested here");
            return;
        }
        let bytes = vec![1u8; 4096];
        // SAFETY: nothing is registered, so nothing is accessed.
        let range = unsafe { MemoryRange::new(bytes.as_ptr() as u64, 4096, MemoryKind::Cuda { device: 0 }) }.unwrap();
        let error = super::super::check(&range).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Cuda | ErrorKind::InvalidArgument), "{error}");
        assert!(PrimaryContext::retain(0).is_err());
        assert_eq!(pointer(bytes.as_ptr() as u64).unwrap(), Pointer::Unknown);
    }
}
