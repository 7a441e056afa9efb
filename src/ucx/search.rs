//! The search for libucp: the places, their order, and the fate of each candidate.

use std::env;
use std::ffi::c_void;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use super::candidate::{Candidate, Fate, LibraryRefusal, LibrarySource, PATH_VARIABLE, Usable, take};
use super::raw::file_of;
use super::status::{Status, UcxError};

pub(super) const OPEN: &str = "open UCX";
const HOW_TO_GET: &str = "install the wheel kvferry-ucx (scripts/build-ucx makes it), or run `pip install libucx-cu12`, \
                          which has no RDMA, or install UCX 1.18 or newer on the system, or name a libucp.so.0 in \
                          KVFERRY_UCX_LIB";

const SONAME: &str = "libucp.so.0";
/// The Python packages with a libucp. A user who installed kvferry-ucx wants that one, so it comes before the system's.
const OWN_PACKAGE: &str = "kvferry_ucx/lib/libucp.so.0";
const LIBUCX: &str = "libucx/lib/libucp.so.0";

/// The last words of [`hint`], for either package.
static HINTS: Mutex<[Option<PathBuf>; 2]> = Mutex::new([None, None]);

/// Names the libucp of a package that the host's own module path leads to. The search tries it after those that it
/// found by itself for the same package.
pub(super) fn hint(path: &Path) {
    let [own, other] = &mut *HINTS.lock().unwrap_or_else(PoisonError::into_inner);
    *(if path.ends_with(OWN_PACKAGE) { own } else { other }) = Some(path.to_path_buf());
}

/// The candidates in their order, and how many of them are tried: where a path is named, only that one.
fn candidates(path: Option<&Path>) -> (Vec<(PathBuf, LibrarySource)>, usize) {
    let mut all = Vec::new();
    match (path, env::var_os(PATH_VARIABLE)) {
        (Some(path), _) => all.push((path.to_path_buf(), LibrarySource::Configured)),
        (None, Some(path)) if !path.is_empty() => all.push((PathBuf::from(path), LibrarySource::Environment)),
        _ => {}
    }
    let named = all.len();
    all.push((PathBuf::from(SONAME), LibrarySource::AlreadyLoaded));
    all.extend(loaded().into_iter().map(|path| (path, LibrarySource::AlreadyLoaded)));
    let folders = package_folders();
    let [own_hint, other_hint] = HINTS.lock().unwrap_or_else(PoisonError::into_inner).clone();
    all.extend(packaged(&folders, OWN_PACKAGE, own_hint).into_iter().map(|path| (path, LibrarySource::OwnPackage)));
    all.push((PathBuf::from(SONAME), LibrarySource::System));
    all.extend(packaged(&folders, LIBUCX, other_hint).into_iter().map(|path| (path, LibrarySource::PythonPackage)));
    let tried = if named > 0 { named } else { all.len() };
    (all, tried)
}

/// Looks for a usable libucp, see [`Library::open`](super::Library::open); also tells what became of every candidate.
pub(super) fn find(path: Option<&Path>) -> (Result<Usable, UcxError>, Vec<Candidate>) {
    let (all, tried) = candidates(path);
    let mut judged = Vec::with_capacity(all.len());
    let mut outcome: Option<Result<Usable, UcxError>> = None;
    let none = |detail: String| UcxError::new(OPEN, Status::NO_LIBRARY, detail);
    let named = tried < all.len() && all.first().is_some_and(|(_, source)| source.is_named());
    let mut refused = Vec::new();
    for (index, (path, source)) in all.into_iter().enumerate() {
        if outcome.is_some() || index >= tried {
            judged.push(Candidate { path, source, fate: Fate::NotTried });
            continue;
        }
        match take(&path, source) {
            Ok(usable) => {
                let info = usable.info.clone();
                judged.push(Candidate { path: info.path, source, fate: Fate::Chosen { version: info.version } });
                outcome = Some(Ok(usable));
            }
            Err(LibraryRefusal { why, version, in_the_way }) => {
                judged.push(Candidate { path, source, fate: Fate::Refused { version, why: why.clone() } });
                if named {
                    let text = format!("the libucp {source} is not usable: {why}; correct the path, or {HOW_TO_GET}");
                    outcome = Some(Err(none(text)));
                } else if in_the_way {
                    outcome = Some(Err(none(why)));
                } else {
                    refused.push(why);
                }
            }
        }
    }
    let outcome = outcome.unwrap_or_else(|| {
        refused.dedup();
        Err(none(format!("{HOW_TO_GET} (tried: {})", refused.join("; "))))
    });
    (outcome, judged)
}

/// The libucp files mapped into this process. Packages rename theirs (`libucp-1a2b3c4d.so.0.0.0`), so the
/// dynamic linker does not find them by their usual name.
pub(super) fn loaded() -> Vec<PathBuf> {
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

/// The libucp of a Python package in those of `folders` that have it, and then that of the hint.
fn packaged(folders: &[PathBuf], in_package: &str, hint: Option<PathBuf>) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    for path in folders.iter().map(|folder| folder.join(in_package)).chain(hint) {
        if path.is_file() && !found.contains(&path) {
            found.push(path);
        }
    }
    found
}

/// The folders where Python packages may lie.
fn package_folders() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = Vec::new();
    // Beside kvferry's own package: <site-packages>/kvferry/libkvferry.so.
    let own = file_of(package_folders as *const c_void);
    if let Some(own) = &own {
        folders.extend(own.ancestors().skip(1).take(3).map(Path::to_path_buf));
    }
    if let Some(list) = env::var_os("PYTHONPATH") {
        folders.extend(env::split_paths(&list));
    }
    // An installed library has its environment around it. The shell's may be another one, of another program.
    let active: &[&str] =
        if own.is_some_and(|own| is_installed(&own)) { &[] } else { &["VIRTUAL_ENV", "CONDA_PREFIX"] };
    let mut prefixes: Vec<PathBuf> = active.iter().filter_map(env::var_os).map(PathBuf::from).collect();
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
    folders
}

/// True if a library lies among the packages of a Python environment.
fn is_installed(library: &Path) -> bool {
    library.ancestors().any(|folder| folder.ends_with("site-packages") || folder.ends_with("dist-packages"))
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
}
