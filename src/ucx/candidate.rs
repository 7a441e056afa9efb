//! A libucp that the search comes by: how, whether it is usable, and what became of it.

use std::ffi::CStr;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use ucx_sys::Ucp;
use ucx_sys::libloading::os::unix::{Library as Handle, RTLD_LOCAL, RTLD_NOW};

use super::raw::{missing, symbol_file};

/// The environment variable that names the libucp to open.
pub const PATH_VARIABLE: &str = "KVFERRY_UCX_LIB";
/// The oldest UCX that is taken, as (major, minor): it has every function used here.
pub const OLDEST: (u32, u32) = (1, 18);

/// How the libucp in use was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LibrarySource {
    /// The caller named it.
    Configured,
    /// The environment variable KVFERRY_UCX_LIB named it.
    Environment,
    /// The process had loaded it before.
    AlreadyLoaded,
    /// The dynamic linker found it.
    System,
    /// It is that of the Python package `kvferry-ucx`.
    OwnPackage,
    /// It is that of a Python package `libucx`.
    PythonPackage,
}

impl fmt::Display for LibrarySource {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Configured => "named by the program as ucx_lib",
            Self::Environment => "named by KVFERRY_UCX_LIB",
            Self::AlreadyLoaded => "already loaded in the process",
            Self::System => "the system's",
            Self::OwnPackage => "of the Python package kvferry-ucx",
            Self::PythonPackage => "of the Python package libucx",
        })
    }
}

impl LibrarySource {
    /// True if somebody named the file; nothing else is tried then.
    pub(super) fn is_named(self) -> bool {
        matches!(self, Self::Configured | Self::Environment)
    }
}

/// Which libucp is in use.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LibraryInfo {
    /// Where it lies.
    pub path: PathBuf,
    /// Its version, for example `1.22.0`.
    pub version: String,
    /// The version as major, minor, release.
    pub number: (u32, u32, u32),
    /// How it was found.
    pub source: LibrarySource,
}

impl fmt::Display for LibraryInfo {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "UCX {} at {} ({})", self.version, self.path.display(), self.source)
    }
}

/// A libucp that the search came by.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Candidate {
    /// Its file. Only its name where the dynamic linker was to find it and did not.
    pub path: PathBuf,
    /// How the search came by it.
    pub source: LibrarySource,
    /// Chosen, refused or not tried.
    pub fate: Fate,
}

/// The fate of a [`Candidate`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Fate {
    /// It is the one in use.
    Chosen {
        /// Its version.
        version: String,
    },
    /// It was opened, or could not be, and is not used.
    Refused {
        /// Its version where it could be opened and is too old.
        version: Option<String>,
        /// Why it is not used.
        why: String,
    },
    /// The search had ended before. It was not opened: a second UCX would disturb the first.
    NotTried,
}

/// Why a candidate was not taken.
pub(super) struct LibraryRefusal {
    pub(super) why: String,
    pub(super) version: Option<String>,
    /// Another UCX beside this one would disturb it, so the search ends.
    pub(super) in_the_way: bool,
}

impl LibraryRefusal {
    pub(super) fn unusable(why: String) -> LibraryRefusal {
        LibraryRefusal { why, version: None, in_the_way: false }
    }
}

/// A candidate that is opened and can be used.
pub(super) struct Usable {
    pub(super) raw: Ucp,
    pub(super) info: LibraryInfo,
}

/// Opens one candidate and checks it.
pub(super) fn take(path: &Path, source: LibrarySource) -> Result<Usable, LibraryRefusal> {
    let unusable = LibraryRefusal::unusable;
    if source.is_named() {
        let kind = fs::metadata(path).map_err(|error| unusable(format!("{}: {error}", path.display())))?;
        if kind.is_dir() {
            return Err(unusable(format!("{} is a folder, expected the file libucp.so.0", path.display())));
        }
    }
    let only_if_loaded = if source == LibrarySource::AlreadyLoaded { libc::RTLD_NOLOAD } else { 0 };
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
        let in_the_way = source == LibrarySource::AlreadyLoaded;
        let why = if in_the_way {
            format!(
                "{why}; two UCX in one process disturb each other, so update the one that loads it, or name a \
                 newer libucp.so.0 in {PATH_VARIABLE} to use that all the same"
            )
        } else {
            why
        };
        return Err(LibraryRefusal { why, version: Some(version), in_the_way });
    }
    let info = LibraryInfo { path, version, number: (major, minor, release), source };
    Ok(Usable { raw, info })
}
