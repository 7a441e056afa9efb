//! Opening libucp at run time: one per process, opened once, never unloaded.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use ucx_sys::Ucp;
use ucx_sys::libloading::os::unix::{Library as Handle, RTLD_LOCAL, RTLD_NOW};

use super::print::printed;
use super::search::{self, Candidate, Refusal};
use super::status::UcxError;

/// The environment variable that names the libucp to open.
pub const PATH_VARIABLE: &str = "KVFERRY_UCX_LIB";
/// The oldest UCX that is taken, as (major, minor): it has every function used here.
pub const OLDEST: (u32, u32) = (1, 18);

/// The first UCX in which a read over CMA from a process that has died is an error. With 1.18.1, 1.19.0, 1.20.1 and
/// 1.21.0 it aborts the reading process.
const UNWATCHED_SINCE: (u32, u32) = (1, 22);

pub(super) const OPEN: &str = "open UCX";
pub(super) const HOW_TO_GET: &str = "run `pip install libucx-cu12`, or install UCX 1.18 or newer on the system, or name a \
                          libucp.so.0 in KVFERRY_UCX_LIB";

/// How the libucp in use was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// The caller named it.
    Configured,
    /// The environment variable KVFERRY_UCX_LIB named it.
    Environment,
    /// The process had loaded it before.
    AlreadyLoaded,
    /// The dynamic linker found it.
    System,
    /// It is that of a Python package `libucx`.
    PythonPackage,
}

impl fmt::Display for Source {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Configured => "configured",
            Self::Environment => "named by KVFERRY_UCX_LIB",
            Self::AlreadyLoaded => "already loaded in the process",
            Self::System => "the system's",
            Self::PythonPackage => "of the Python package libucx",
        })
    }
}

impl Source {
    /// Whether somebody named the file; nothing else is tried then.
    pub(super) fn is_named(self) -> bool {
        matches!(self, Self::Configured | Self::Environment)
    }
}

/// Which libucp is in use.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LibraryInfo {
    /// Where it lies.
    pub path: PathBuf,
    /// What it says its version is, for example `1.22.0`.
    pub version: String,
    /// The version as major, minor, release.
    pub number: (u32, u32, u32),
    /// How it was found.
    pub source: Source,
}

impl fmt::Display for LibraryInfo {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "UCX {} at {} ({})", self.version, self.path.display(), self.source)
    }
}

/// The process's libucp.
pub struct Library {
    raw: Ucp,
    info: LibraryInfo,
    /// What the search that found it came by.
    candidates: Vec<Candidate>,
}

static OPENED: OnceLock<Library> = OnceLock::new();
static OPENING: Mutex<()> = Mutex::new(());

impl Library {
    /// Opens libucp, or returns the one that this process has opened.
    ///
    /// The search stops at the first that is usable: `path`, the file in KVFERRY_UCX_LIB, one that the process
    /// has loaded already, the dynamic linker's `libucp.so.0`, that of a Python package `libucx` (beside
    /// kvferry's own package, then in PYTHONPATH, VIRTUAL_ENV and CONDA_PREFIX). Where a path is named,
    /// nothing else is tried. A failure is not remembered, so a later call may succeed.
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

    /// Every libucp that the search comes by, in its order, and what became of each. Opens libucp as [`Library::open`]
    /// does; where this process has opened one already, the answer is that of the search which found it, and `path`
    /// is not looked at. None is [`Fate::Chosen`](super::Fate::Chosen) where none is usable.
    pub fn candidates(path: Option<&Path>) -> Vec<Candidate> {
        let _one_at_a_time = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
        match OPENED.get() {
            Some(library) => library.candidates.clone(),
            None => search_and_keep(path).1,
        }
    }

    /// The libucp that this process has opened, if it has.
    pub fn opened() -> Option<&'static Self> {
        OPENED.get()
    }

    /// Path, version and origin.
    pub fn info(&self) -> &LibraryInfo {
        &self.info
    }

    /// True when endpoints may leave their peer unwatched: before UCX 1.22 a peer's death could abort the
    /// process then.
    pub fn allows_unwatched_peers(&self) -> bool {
        let (major, minor, _) = self.info.number;
        (major, minor) >= UNWATCHED_SINCE
    }

    /// Other libucp files that are loaded in this process now. Two UCX in a process disturb each other
    /// (both hook memory calls), so a user should be told.
    pub fn others() -> Vec<PathBuf> {
        let ours = OPENED.get().map(|library| real(&library.info.path));
        search::loaded().into_iter().filter(|path| Some(real(path)) != ours).collect()
    }

    /// The functions. All that [`missing`] lists are there, so their methods cannot panic.
    pub(super) fn api(&self) -> &Ucp {
        &self.raw
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
    let kept = found.map(|library| OPENED.get_or_init(|| Library { candidates: candidates.clone(), ..library }));
    (kept, candidates)
}

/// Opens one candidate and checks it.
pub(super) fn take(path: &Path, source: Source) -> Result<Library, Refusal> {
    let unusable = Refusal::unusable;
    if source.is_named() {
        let kind = fs::metadata(path).map_err(|error| unusable(format!("{}: {error}", path.display())))?;
        if kind.is_dir() {
            return Err(unusable(format!("{} is a folder, expected the file libucp.so.0", path.display())));
        }
    }
    let only_if_loaded = if source == Source::AlreadyLoaded { libc::RTLD_NOLOAD } else { 0 };
    // SAFETY: opening runs the library's constructors. Those of UCX read the environment and install no
    // handlers by themselves; a foreign library under UCX's name is the user's own choice.
    let handle = unsafe { Handle::open(Some(path), RTLD_NOW | RTLD_LOCAL | only_if_loaded) }
        .map_err(|error| unusable(format!("{} ({source}): {error}", path.display())))?;
    // SAFETY: only looks up symbols; each is used with the type that UCX's headers give it, and the interface
    // of UCP has been stable since 1.0 within its major version.
    let raw = unsafe { Ucp::from_library(handle) }
        .map_err(|error| unusable(format!("{} ({source}): {error}", path.display())))?;
    let missing = missing(&raw);
    if !missing.is_empty() {
        let why = format!("{} ({source}) lacks {}", path.display(), missing.join(", "));
        // Unloading UCX is not safe once its constructors ran, so what was refused stays loaded.
        std::mem::forget(raw);
        return Err(unusable(why));
    }
    let (mut major, mut minor, mut release) = (0, 0, 0);
    // SAFETY: the function writes three integers and always succeeds.
    unsafe { raw.ucp_get_version(&mut major, &mut minor, &mut release) };
    // SAFETY: the function returns a static NUL-terminated string.
    let version = unsafe { CStr::from_ptr(raw.ucp_get_version_string()) }.to_string_lossy().into_owned();
    let path = symbol_file(&raw).unwrap_or_else(|| path.to_path_buf());
    if major != OLDEST.0 || minor < OLDEST.1 {
        let why = format!(
            "{} ({source}) is UCX {version}, and kvferry needs UCX {}.{} or a newer {}.x",
            path.display(),
            OLDEST.0,
            OLDEST.1,
            OLDEST.0
        );
        std::mem::forget(raw);
        let in_the_way = source == Source::AlreadyLoaded;
        let why = if in_the_way {
            format!(
                "{why}; two UCX in one process disturb each other, so update the one that loads it, or name a \
                 newer libucp.so.0 in {PATH_VARIABLE} to use that all the same"
            )
        } else {
            why
        };
        return Err(Refusal { why, version: Some(version), in_the_way });
    }
    let info = LibraryInfo { path, version, number: (major, minor, release), source };
    Ok(Library { raw, info, candidates: Vec::new() })
}

macro_rules! list_missing {
    ($raw:expr, $($name:ident),+ $(,)?) => {{
        let mut names: Vec<&'static str> = Vec::new();
        $(if $raw.$name.is_err() { names.push(stringify!($name)); })+
        names
    }};
}

/// The functions that this layer calls without asking whether they exist.
fn missing(raw: &Ucp) -> Vec<&'static str> {
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
        ucp_worker_signal,
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
fn symbol_file(raw: &Ucp) -> Option<PathBuf> {
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
