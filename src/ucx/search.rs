//! Where libucp is looked for, in which order, and what became of each candidate.

use std::env;
use std::ffi::c_void;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use super::candidate::{Candidate, Fate, PATH_VARIABLE, Refusal, Source, Usable, take};
use super::raw::file_of;
use super::status::{Status, UcxError};

pub(super) const OPEN: &str = "open UCX";
const HOW_TO_GET: &str = "run `pip install libucx-cu12`, or install UCX 1.18 or newer on the system, or name a \
                          libucp.so.0 in KVFERRY_UCX_LIB";

const SONAME: &str = "libucp.so.0";
const IN_PACKAGE: &str = "libucx/lib/libucp.so.0";

/// What [`hint`] was told last.
static HINT: Mutex<Option<PathBuf>> = Mutex::new(None);

/// Names the libucp of a package that the host's own module path leads to. The search tries it last.
pub(super) fn hint(path: &Path) {
    *HINT.lock().unwrap_or_else(PoisonError::into_inner) = Some(path.to_path_buf());
}

/// The candidates in their order, and how many of them are tried: where a path is named, only that one.
fn candidates(path: Option<&Path>) -> (Vec<(PathBuf, Source)>, usize) {
    let mut all = Vec::new();
    match (path, env::var_os(PATH_VARIABLE)) {
        (Some(path), _) => all.push((path.to_path_buf(), Source::Configured)),
        (None, Some(path)) if !path.is_empty() => all.push((PathBuf::from(path), Source::Environment)),
        _ => {}
    }
    let named = all.len();
    all.push((PathBuf::from(SONAME), Source::AlreadyLoaded));
    all.extend(loaded().into_iter().map(|path| (path, Source::AlreadyLoaded)));
    all.push((PathBuf::from(SONAME), Source::System));
    all.extend(packaged().into_iter().map(|path| (path, Source::PythonPackage)));
    let hint = HINT.lock().unwrap_or_else(PoisonError::into_inner).clone();
    if let Some(path) = hint.filter(|path| path.is_file() && !all.iter().any(|(known, _)| known == path)) {
        all.push((path, Source::PythonPackage));
    }
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
            Err(Refusal { why, version, in_the_way }) => {
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
