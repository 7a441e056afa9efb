//! The functions of libucp, and those of the one that this process has opened.

use std::ffi::{CStr, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;

use ucx_sys::Ucp;

static OPENED: OnceLock<Ucp> = OnceLock::new();

/// The functions of the libucp that this process uses, if it has opened one.
pub(super) fn opened() -> Option<&'static Ucp> {
    OPENED.get()
}

/// Keeps the functions of the one that is opened, for the life of the process. The first stays.
pub(super) fn keep(raw: Ucp) -> &'static Ucp {
    OPENED.get_or_init(|| raw)
}

macro_rules! list_missing {
    ($raw:expr, $($name:ident),+ $(,)?) => {{
        let mut names: Vec<&'static str> = Vec::new();
        $(if $raw.$name.is_err() { names.push(stringify!($name)); })+
        names
    }};
}

/// The functions that this layer calls without asking whether they exist.
pub(super) fn missing(raw: &Ucp) -> Vec<&'static str> {
    list_missing!(
        raw,
        ucs_status_string,
        ucp_get_version,
        ucp_get_version_string,
        ucp_config_read,
        ucp_config_modify,
        ucp_config_release,
        ucp_init_version,
        ucp_cleanup,
        ucp_context_query,
        ucp_worker_create,
        ucp_worker_destroy,
        ucp_worker_query,
        ucp_worker_release_address,
        ucp_worker_progress,
        ucp_worker_get_efd,
        ucp_worker_arm,
        ucp_worker_set_am_recv_handler,
        ucp_ep_create,
        ucp_ep_close_nbx,
        ucp_ep_flush_nbx,
        ucp_ep_rkey_unpack,
        ucp_rkey_destroy,
        ucp_rkey_pack,
        ucp_rkey_buffer_release,
        ucp_mem_map,
        ucp_mem_unmap,
        ucp_mem_query,
        ucp_get_nbx,
        ucp_put_nbx,
        ucp_am_send_nbx,
        ucp_request_free,
    )
}

/// The file that holds the loaded library's code, told by the dynamic linker.
pub(super) fn symbol_file(raw: &Ucp) -> Option<PathBuf> {
    let function = raw.ucp_get_version_string.as_ref().ok()?;
    file_of(*function as *const c_void)
}

pub(super) fn file_of(address: *const c_void) -> Option<PathBuf> {
    let mut found = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: dladdr takes any address and fills the structure, which is valid when all zero, on success.
    let known = unsafe { libc::dladdr(address, found.as_mut_ptr()) } != 0;
    // SAFETY: zeroed above, and every field is a pointer, for which zero is valid.
    let found = unsafe { found.assume_init() };
    if !known || found.dli_fname.is_null() {
        return None;
    }
    // SAFETY: dladdr returns the NUL-terminated file name of a loaded object; ours is never unloaded.
    let name = unsafe { CStr::from_ptr(found.dli_fname) };
    Some(PathBuf::from(name.to_str().ok()?))
}
