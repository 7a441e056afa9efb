//! Kinds of memory, as UCX tells them apart.

use std::fmt;

use ucx_sys::ucs_memory_type_t;

/// The kind of memory that UCX takes a range for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum MemoryKind {
    /// Memory of the host.
    Host,
    /// Memory of a CUDA device.
    Cuda,
    /// Memory that the CUDA driver moves between host and device.
    CudaManaged,
    /// Any other of UCX's `ucs_memory_type_t`, by its number.
    Other(u32),
}

impl MemoryKind {
    /// The number that UCX gives it.
    pub const fn code(self) -> u32 {
        match self {
            Self::Host => ucx_sys::UCS_MEMORY_TYPE_HOST.0,
            Self::Cuda => ucx_sys::UCS_MEMORY_TYPE_CUDA.0,
            Self::CudaManaged => ucx_sys::UCS_MEMORY_TYPE_CUDA_MANAGED.0,
            Self::Other(code) => code,
        }
    }

    /// True if UCX may say `seen` of memory that is of this kind. Of memory from a pool of a CUDA device
    /// (`cudaMallocAsync`) it says that CUDA manages it, unless it is told otherwise
    /// (`UCX_CUDA_COPY_ASYNC_MEM_TYPE`).
    pub fn may_be_seen_as(self, seen: Self) -> bool {
        self == seen || (self, seen) == (Self::Cuda, Self::CudaManaged)
    }

    /// The kind of the number that UCX gives it.
    pub const fn from_code(code: u32) -> Self {
        match ucs_memory_type_t(code) {
            ucx_sys::UCS_MEMORY_TYPE_HOST => Self::Host,
            ucx_sys::UCS_MEMORY_TYPE_CUDA => Self::Cuda,
            ucx_sys::UCS_MEMORY_TYPE_CUDA_MANAGED => Self::CudaManaged,
            _ => Self::Other(code),
        }
    }
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => out.write_str("host"),
            Self::Cuda => out.write_str("cuda"),
            Self::CudaManaged => out.write_str("cuda-managed"),
            Self::Other(code) => write!(out, "type {code}"),
        }
    }
}

/// The kinds of memory that a context can move.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct MemoryTypes(pub(super) u64);

impl MemoryTypes {
    /// True when memory of this kind can be moved.
    pub fn contains(self, kind: MemoryKind) -> bool {
        1u64.checked_shl(kind.code()).is_some_and(|bit| self.0 & bit != 0)
    }
}

impl fmt::Display for MemoryTypes {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut between = "";
        for code in (0..u64::BITS).filter(|code| self.0 >> code & 1 == 1) {
            write!(out, "{between}{}", MemoryKind::from_code(code))?;
            between = ", ";
        }
        Ok(())
    }
}

impl fmt::Debug for MemoryTypes {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{{{self}}}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_types_are_named() {
        let types = MemoryTypes(0b11);
        assert!(types.contains(MemoryKind::Host) && types.contains(MemoryKind::Cuda));
        assert!(!types.contains(MemoryKind::CudaManaged));
        assert!(!types.contains(MemoryKind::Other(200)));
        assert_eq!(types.to_string(), "host, cuda");
    }
}
