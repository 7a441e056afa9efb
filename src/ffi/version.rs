//! Versions of the library.

use std::ffi::{CStr, c_char};

use crate::proto::wire;

/// The number of this C ABI: raised when a program compiled against an older header would misbehave.
const ABI: u32 = 1;

const VERSION: &CStr = match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
    Ok(version) => version,
    Err(_) => c"",
};

/// The library's version, such as "0.1.0". The string lives as long as the process.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_version() -> *const c_char {
    VERSION.as_ptr()
}

/// Gives the newest protocol version that this library speaks ("Versions" in docs/protocol.md).
#[unsafe(no_mangle)]
pub extern "C" fn kvf_protocol_version() -> u32 {
    wire::VERSION.into()
}

/// The oldest protocol version that this library speaks to other engines.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_protocol_oldest() -> u32 {
    wire::OLDEST.into()
}

/// Gives the number of the C ABI. A program checks that it is the KVF_ABI_VERSION that it was compiled with.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_abi_version() -> u32 {
    ABI
}
