//! Versions of the library and of what it stands on.

use std::ffi::{CStr, c_char};
use std::path::Path;

use serde::Serialize;

use super::boundary::text;
use super::buffer::{fill, kvf_buffer};
use super::decode;
use crate::error::Result;
use crate::mem::ucx_error;
use crate::ucx::Library;

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

/// The number of the C ABI. A program checks that it is the KVF_ABI_VERSION that it was compiled with.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_abi_version() -> u32 {
    ABI
}

#[derive(Serialize)]
struct UcxInfo {
    path: String,
    version: String,
    source: String,
}

/// Opens the UCX that agents of this process use, and tells which it is: a msgpack map of path, version and source
/// (how it was found). `ucx_lib` is the path of a libucp, or NULL with length 0 to have one found. A process has one
/// UCX: another path than the one in use is KVF_INVALID_ARGUMENT. Without a usable one it is KVF_UCX_MISSING, and the
/// text says where it was looked for and how to get one.
///
/// # Safety
/// As the header's top says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_ucx_info(ucx_lib: *const c_char, ucx_lib_len: usize, out: *mut kvf_buffer) -> i32 {
    boundary!(kvf_ucx_info, {
        // SAFETY: the caller's promise for out-parameters and arrays.
        unsafe {
            let path = text(ucx_lib, ucx_lib_len, "ucx_lib")?;
            fill(out, || ucx_info((!path.is_empty()).then(|| Path::new(path))))
        }
    })
}

fn ucx_info(path: Option<&Path>) -> Result<Vec<u8>> {
    let info = Library::open(path).map_err(ucx_error)?.info();
    let named = UcxInfo {
        path: info.path.display().to_string(),
        version: info.version.clone(),
        source: info.source.to_string(),
    };
    decode::encode("ucx info", &named)
}
