//! Opening libucp at run time: one per process, opened once, never unloaded.

use std::env;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use ucx_sys::Ucp;
use ucx_sys::libloading::os::unix::{Library as Handle, RTLD_LOCAL, RTLD_NOW};

use super::status::{Status, UcxError};

/// The environment variable that names the libucp to open.
pub const PATH_VARIABLE: &str = "KVFERRY_UCX_LIB";
/// The oldest UCX that works, as (major, minor): the first of which every function used here was checked.
pub const OLDEST: (u32, u32) = (1, 18);

/// The first UCX in which a read over CMA from a process that has died is an error. Of 1.18.1, 1.19.0, 1.20.1 and
/// 1.21.0 it was measured to abort the reading process.
const UNWATCHED_SINCE: (u32, u32) = (1, 22);

const SONAME: &str = "libucp.so.0";
const IN_PACKAGE: &str = "libucx/lib/libucp.so.0";
const OPEN: &str = "open UCX";
const HOW_TO_GET: &str = "run `pip install libucx-cu12`, or install UCX 1.18 or newer on the system, or name a \
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
    /// [`Status::NO_LIBRARY`] when none is usable, with the reason for each that was tried and the fix;
    /// [`Status::INVALID_PARAM`] when `path` is another libucp than the one already opened.
    pub fn open(path: Option<&Path>) -> Result<&'static Self, UcxError> {
        // The lock guards no data: the first of two threads opens, the second finds it opened.
        let _one_at_a_time = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
        let library = match OPENED.get() {
            Some(library) => library,
            None => {
                let library = find(path)?;
                OPENED.get_or_init(|| library)
            }
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
        loaded().into_iter().filter(|path| Some(real(path)) != ours).collect()
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

/// Why a candidate was not taken.
enum Refusal {
    /// The search goes on to the next candidate.
    Unusable(String),
    /// Another UCX beside this one would disturb it, so the search ends.
    InTheWay(String),
}

fn find(path: Option<&Path>) -> Result<Library, UcxError> {
    let none = |detail: String| UcxError::new(OPEN, Status::NO_LIBRARY, detail);
    let named = match (path, env::var_os(PATH_VARIABLE)) {
        (Some(path), _) => Some((path.to_path_buf(), Source::Configured)),
        (None, Some(path)) if !path.is_empty() => Some((PathBuf::from(path), Source::Environment)),
        _ => None,
    };
    if let Some((path, source)) = named {
        return take(&path, source).map_err(|refusal| match refusal {
            Refusal::Unusable(why) | Refusal::InTheWay(why) => {
                none(format!("the libucp {source} is not usable: {why}; correct the path, or {HOW_TO_GET}"))
            }
        });
    }
    let mut candidates: Vec<(PathBuf, Source)> = vec![(PathBuf::from(SONAME), Source::AlreadyLoaded)];
    candidates.extend(loaded().into_iter().map(|path| (path, Source::AlreadyLoaded)));
    candidates.push((PathBuf::from(SONAME), Source::System));
    candidates.extend(packaged().into_iter().map(|path| (path, Source::PythonPackage)));
    let mut refused = Vec::new();
    for (path, source) in candidates {
        match take(&path, source) {
            Ok(library) => return Ok(library),
            Err(Refusal::Unusable(why)) => refused.push(why),
            Err(Refusal::InTheWay(why)) => return Err(none(why)),
        }
    }
    refused.dedup();
    Err(none(format!("{HOW_TO_GET} (tried: {})", refused.join("; "))))
}

/// Opens one candidate and checks it.
fn take(path: &Path, source: Source) -> Result<Library, Refusal> {
    let unusable = |why: String| Refusal::Unusable(why);
    if source == Source::Configured || source == Source::Environment {
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
        return Err(if source == Source::AlreadyLoaded {
            Refusal::InTheWay(format!(
                "{why}; two UCX in one process disturb each other, so update the one that loads it, or name a \
                 newer libucp.so.0 in {PATH_VARIABLE} to use that all the same"
            ))
        } else {
            unusable(why)
        });
    }
    Ok(Library { raw, info: LibraryInfo { path, version, number: (major, minor, release), source } })
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
        ucp_am_recv_data_nbx,
        ucp_am_data_release,
        ucp_request_free,
    )
}

/// The file that holds the loaded library's code, told by the dynamic linker.
fn symbol_file(raw: &Ucp) -> Option<PathBuf> {
    let function = raw.ucp_get_version_string.as_ref().ok()?;
    file_of(*function as *const c_void)
}

fn file_of(address: *const c_void) -> Option<PathBuf> {
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

/// The libucp files mapped into this process. Packages rename theirs (`libucp-1a2b3c4d.so.0.0.0`), so the
/// dynamic linker does not find them by their usual name.
fn loaded() -> Vec<PathBuf> {
    let maps = fs::read("/proc/self/maps").unwrap_or_default();
    mapped_libucp(&String::from_utf8_lossy(&maps))
}

fn mapped_libucp(maps: &str) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    for line in maps.lines() {
        // address, permissions, offset, device, inode, then the path, which may hold blanks.
        let Some(start) = line.find('/') else { continue };
        let path = Path::new(line.get(start..).unwrap_or_default());
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let ours = name.strip_prefix("libucp").is_some_and(|rest| {
            (rest.starts_with('.') || rest.starts_with('-')) && rest.contains(".so") && !rest.ends_with(" (deleted)")
        });
        if ours && !found.iter().any(|known| known == path) {
            found.push(path.to_path_buf());
        }
    }
    found
}

/// The places where a Python package `libucx` may lie, those that exist.
fn packaged() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = Vec::new();
    // Beside kvferry's own package: <site-packages>/kvferry/libkvferry.so.
    if let Some(own) = file_of(packaged as *const c_void) {
        folders.extend(own.ancestors().skip(1).take(3).map(Path::to_path_buf));
    }
    if let Some(list) = env::var_os("PYTHONPATH") {
        folders.extend(env::split_paths(&list));
    }
    let mut prefixes: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(env::var_os).map(PathBuf::from).collect();
    // Cargo sets this for the tests and examples of a checkout, whose set-up makes this environment.
    if let Some(checkout) = env::var_os("CARGO_MANIFEST_DIR") {
        prefixes.push(Path::new(&checkout).join(".deps/venv"));
    }
    for prefix in prefixes {
        for entry in fs::read_dir(prefix.join("lib")).into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().starts_with("python3") {
                folders.push(entry.path().join("site-packages"));
            }
        }
    }
    let mut found: Vec<PathBuf> =
        folders.into_iter().map(|folder| folder.join(IN_PACKAGE)).filter(|path| path.is_file()).collect();
    found.dedup();
    found
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
    let (mut text, mut length) = (std::ptr::null_mut::<c_char>(), 0usize);
    // SAFETY: both out-parameters live until fclose below.
    let stream = unsafe { libc::open_memstream(&mut text, &mut length) };
    if stream.is_null() {
        return Vec::new();
    }
    let flags = (ucx_sys::UCS_CONFIG_PRINT_CONFIG.0 | ucx_sys::UCS_CONFIG_PRINT_HIDDEN.0) as c_int;
    // SAFETY: the stream is open, the prefix is a C string, the list is UCX's own, and a null filter stands for
    // none. UCX changes the list only while it loads modules, and the caller keeps that apart.
    unsafe { print(stream, c"UCX_".as_ptr(), flags, list, std::ptr::null()) };
    // SAFETY: the stream is open and not used again; closing makes `text` and `length` final.
    unsafe { libc::fclose(stream) };
    if text.is_null() {
        return Vec::new();
    }
    // SAFETY: open_memstream's buffer holds `length` bytes and a NUL.
    let names = unsafe { CStr::from_ptr(text) }.to_string_lossy().lines().filter_map(setting_name).collect();
    // SAFETY: the buffer came from malloc inside open_memstream and is not used again.
    unsafe { libc::free(text.cast()) };
    names
}

fn setting_name(line: &str) -> Option<String> {
    let name = line.trim_start_matches(['#', ' ']).strip_prefix("UCX_")?.split_once('=')?.0;
    Some(name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libucp_is_found_among_mappings() {
        let maps = "7f00-7f01 r-xp 00000000 08:01 11 /usr/lib/libucp.so.0.0.0\n\
                    7f01-7f02 r--p 00001000 08:01 11 /usr/lib/libucp.so.0.0.0\n\
                    7f02-7f03 r-xp 00000000 08:01 12 /opt/a b/libucp-1a2b.so.0\n\
                    7f03-7f04 r-xp 00000000 08:01 13 /opt/libucs.so.0\n\
                    7f04-7f05 r-xp 00000000 08:01 14 /opt/libucp_extra.so\n\
                    7f05-7f06 rw-p 00000000 00:00 0 \n";
        let expected = ["/usr/lib/libucp.so.0.0.0", "/opt/a b/libucp-1a2b.so.0"].map(PathBuf::from);
        assert_eq!(mapped_libucp(maps), expected);
    }

    #[test]
    fn setting_names_are_read_from_a_printed_configuration() {
        assert_eq!(setting_name("UCX_TCP_TX_SEG_SIZE=8K"), Some("TCP_TX_SEG_SIZE".to_owned()));
        assert_eq!(setting_name("#UCX_TLS=all"), Some("TLS".to_owned()));
        assert_eq!(setting_name("# some text"), None);
    }
}
