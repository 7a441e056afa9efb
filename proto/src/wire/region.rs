//! How a region's memory is reached.

use serde::{Deserialize, Serialize};

/// Where a region's bytes live.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryKind {
    /// Ordinary process memory.
    Host,
    /// Memory of a CUDA device, by its ordinal in the owning process.
    Cuda {
        /// The device ordinal.
        device: u32,
    },
}

/// How other processes of the owner's host map device memory. By CUDA's handle of the allocation that a region is in,
/// or piece by piece.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DeviceHandle {
    /// The handle's bytes (`CUipcMemHandle`, 64); none where there are pieces.
    #[serde(with = "serde_bytes")]
    pub handle: Vec<u8>,
    /// Offset of the region in the allocation, or in the first piece, in bytes.
    pub offset: u64,
    /// The allocations that the region's addresses are mapped to, one behind the other.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pieces: Vec<DevicePiece>,
}

/// An allocation of CUDA's virtual memory management.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DevicePiece {
    /// The descriptor of its handle in the owner's process. -1 where it has a fabric handle instead.
    pub fd: i32,
    /// Its length in bytes.
    pub len: u64,
    /// The bytes of its fabric handle (`CUmemFabricHandle`, 64); none where there is a descriptor.
    #[serde(default, skip_serializing_if = "Vec::is_empty", with = "serde_bytes")]
    pub fabric: Vec<u8>,
}

/// One registered region as a remote agent needs it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RegionMetadata {
    /// Virtual address of the first byte in the owning process.
    pub base: u64,
    /// Length in bytes.
    pub len: u64,
    /// Kind of memory.
    pub kind: MemoryKind,
    /// The packed rkey in its checked envelope.
    #[serde(with = "serde_bytes")]
    pub rkey: Vec<u8>,
    /// Device memory: the handle for other processes of the host, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub handle: Option<DeviceHandle>,
    /// Device memory: true if several allocations are mapped behind its addresses. A transport may know the first
    /// only.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_scattered: bool,
    /// Host memory: true if the kernel alone fills its missing pages. A copy of it then waits for no other program.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_filled_by_kernel: bool,
}

impl RegionMetadata {
    /// Tells whether it stands for a region that is gone.
    pub fn is_gone(&self) -> bool {
        self.len == 0 && self.rkey.is_empty()
    }

    /// `len` bytes of host memory that nobody can reach. They are of a rank that is only described, or of a region
    /// that is gone.
    pub fn unreachable(len: u64) -> RegionMetadata {
        let (base, kind, rkey) = (0, MemoryKind::Host, Vec::new());
        RegionMetadata { base, len, kind, rkey, handle: None, is_scattered: false, is_filled_by_kernel: false }
    }
}
