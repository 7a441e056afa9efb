//! Opening libucp at run time: one per process, opened once, never unloaded.

use std::ffi::{c_char, c_int, c_void};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use ucx_sys::Ucp;

use super::candidate::{Candidate, LibraryInfo, Usable};
use super::print::printed;
use super::raw;
use super::search::{self, OPEN};
use super::status::UcxError;

/// The process's libucp.
pub struct Library {
    raw: &'static Ucp,
    info: LibraryInfo,
    /// The candidates of the search that found it.
    candidates: Vec<Candidate>,
}

static OPENED: OnceLock<Library> = OnceLock::new();
static OPENING: Mutex<()> = Mutex::new(());

impl Library {
    /// Opens libucp, or returns the one that this process has opened.
    ///
    /// The search stops at the first that is usable: `path`, the file in KVFERRY_UCX_LIB, one that the process
    /// has loaded already, that of the Python package `kvferry-ucx`, the dynamic linker's `libucp.so.0`, that of a Python
    /// package `libucx` (either package beside kvferry's own, then in PYTHONPATH, then, unless kvferry is installed in a
    /// Python environment, in VIRTUAL_ENV and CONDA_PREFIX, then where [`Library::hint`] says).
    /// Where a path is named, nothing else is tried. A failure is not remembered, so a later call may succeed.
    ///
    /// # Errors
    /// [`Status::NO_LIBRARY`](super::Status::NO_LIBRARY) when none is usable, with the reason for each that was tried and the fix;
    /// [`Status::INVALID_PARAM`](super::Status::INVALID_PARAM) when `path` is another libucp than the one already opened.
    pub fn open(path: Option<&Path>) -> Result<&'static Self, UcxError> {
        // The lock guards no data: the first of two threads opens, the second finds it opened.
        let _one_at_a_time = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
        let library = match OPENED.get() {
            Some(library) => library,
            None => search_and_keep(path).0?,
        };
        match path {
            Some(path) if real(path) != real(&library.info.path) => Err(UcxError::invalid(
                OPEN,
                format!(
                    "{} was asked for, but this process uses {}; a process has one UCX, so name the same path \
                     everywhere or none",
                    path.display(),
                    library.info
                ),
            )),
            _ => Ok(library),
        }
    }

    /// Tells later searches where a Python package `kvferry-ucx` or `libucx` lies. `path` is that of its libucp,
    /// where only the host's own module path leads to it. It is tried after those of the same package that the search
    /// finds. The last hint for either package counts.
    pub fn hint(path: &Path) {
        search::hint(path);
    }

    /// Every libucp that the search comes by, in its order, and what became of each. Opens libucp as [`Library::open`]
    /// does; where this process has opened one already, the answer is that of the search which found it, and `path`
    /// is ignored. None is [`Fate::Chosen`](super::Fate::Chosen) where none is usable.
    pub fn candidates(path: Option<&Path>) -> Vec<Candidate> {
        let _one_at_a_time = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
        match OPENED.get() {
            Some(library) => library.candidates.clone(),
            None => search_and_keep(path).1,
        }
    }

    /// Path, version and origin.
    pub fn info(&self) -> &LibraryInfo {
        &self.info
    }

    /// Other libucp files that are loaded in this process now. Two UCX in a process disturb each other
    /// (both hook memory calls), so a user should be told.
    pub fn others() -> Vec<PathBuf> {
        let ours = OPENED.get().map(|library| real(&library.info.path));
        search::loaded().into_iter().filter(|path| Some(real(path)) != ours).collect()
    }

    /// The functions. All that [`raw::missing`] lists are there, so their methods cannot panic.
    pub(super) fn api(&self) -> &'static Ucp {
        self.raw
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.info, out)
    }
}

/// Searches, and keeps what was found for the life of the process. The caller holds [`OPENING`].
fn search_and_keep(path: Option<&Path>) -> (Result<&'static Library, UcxError>, Vec<Candidate>) {
    let (found, candidates) = search::find(path);
    let kept = found.map(|Usable { raw, info }| {
        OPENED.get_or_init(|| Library { raw: raw::keep(raw), info, candidates: candidates.clone() })
    });
    (kept, candidates)
}

fn real(path: &Path) -> PathBuf {
    fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf())
}

/// The names of all settings that the loaded UCX knows, without the prefix `UCX_`; empty when it cannot tell.
///
/// UCP has no function for this; `ucx_info -c` uses the one below. A transport's settings are known once
/// its module is loaded, which making a context does; no context may be made meanwhile.
pub(super) fn known_settings(library: &Library) -> Vec<String> {
    type PrintAll = unsafe extern "C" fn(*mut libc::FILE, *const c_char, c_int, *mut c_void, *const c_char);
    let (Some(print), Some(list)) =
        (library.raw.symbol(b"ucs_config_parser_print_all_opts\0"), library.raw.symbol(b"ucs_config_global_list\0"))
    else {
        return Vec::new();
    };
    // SAFETY: this is the function's type in ucs/config/parser.h since before 1.18; `symbol` found it non-null.
    let print = unsafe { std::mem::transmute::<*mut c_void, PrintAll>(print) };
    let flags = (ucx_sys::UCS_CONFIG_PRINT_CONFIG.0 | ucx_sys::UCS_CONFIG_PRINT_HIDDEN.0) as c_int;
    // SAFETY: the stream is open, the prefix is a C string, the list is UCX's own, and a null filter stands for
    // none. UCX changes the list only while it loads modules, and the caller keeps that apart.
    let text = printed(|stream| unsafe { print(stream, c"UCX_".as_ptr(), flags, list, std::ptr::null()) });
    text.lines().filter_map(setting_name).collect()
}

fn setting_name(line: &str) -> Option<String> {
    let name = line.trim_start_matches(['#', ' ']).strip_prefix("UCX_")?.split_once('=')?.0;
    Some(name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn setting_names_are_read_from_a_printed_configuration() {
        assert_eq!(setting_name("UCX_TCP_TX_SEG_SIZE=8K"), Some("TCP_TX_SEG_SIZE".to_owned()));
        assert_eq!(setting_name("#UCX_TLS=all"), Some("TLS".to_owned()));
        assert_eq!(setting_name("# some text"), None);
    }
}
