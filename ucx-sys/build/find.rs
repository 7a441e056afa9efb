//! Where the build finds UCX's headers, libclang and the C library's headers.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The environment variables that steer the search, for which it is made again when they change. PATH, on which the last
/// ones lie that it asks, is not among them: it differs between shells and virtual environments, and what was found stays
/// as good.
pub const VARIABLES: &[&str] =
    &["KVFERRY_UCX_INCLUDE", "KVFERRY_PYTHON", "VIRTUAL_ENV", "LIBCLANG_PATH", "CC", "PKG_CONFIG_PATH"];

/// The first UCX whose interface has everything that kvferry needs.
const OLDEST: (u32, u32) = (1, 18);

/// Folders of Python's that may hold the packages `libucx` and `libclang`.
pub struct PythonPackages {
    folders: Vec<PathBuf>,
}

impl PythonPackages {
    /// Asks KVFERRY_PYTHON, the active virtual environment, the repository's `.deps/venv` and the
    /// `python3` on PATH, in this order, where their packages lie.
    pub fn look(manifest_dir: &Path) -> Self {
        let mut interpreters = Vec::new();
        if let Some(python) = env::var_os("KVFERRY_PYTHON") {
            interpreters.push(PathBuf::from(python));
        }
        if let Some(venv) = env::var_os("VIRTUAL_ENV") {
            interpreters.push(Path::new(&venv).join("bin/python3"));
        }
        if let Some(root) = manifest_dir.parent() {
            interpreters.push(root.join(".deps/venv/bin/python3"));
        }
        interpreters.push(PathBuf::from("python3"));
        let mut folders: Vec<PathBuf> = Vec::new();
        for python in interpreters {
            for folder in package_folders(&python) {
                if !folders.contains(&folder) {
                    folders.push(folder);
                }
            }
        }
        Self { folders }
    }

    fn holding(&self, relative: &str) -> Option<PathBuf> {
        self.folders.iter().map(|folder| folder.join(relative)).find(|path| path.exists())
    }
}

fn package_folders(python: &Path) -> Vec<PathBuf> {
    // `-I` would hide user-wide packages and PYTHONPATH, which are as good as any other here.
    let script = "import sys, sysconfig\n\
                  print('\\n'.join([*sys.path, sysconfig.get_path('purelib'), sysconfig.get_path('platlib')]))";
    match Command::new(python).arg("-c").arg(script).output() {
        Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout)
            .lines()
            .filter(|line| !line.is_empty())
            .map(PathBuf::from)
            .filter(|path| path.is_dir())
            .collect(),
        _ => Vec::new(),
    }
}

/// The folder that holds `ucp/api/ucp.h`.
pub fn ucx_headers(packages: &PythonPackages) -> Result<PathBuf, String> {
    const HEADER: &str = "ucp/api/ucp.h";
    if let Some(folder) = env::var_os("KVFERRY_UCX_INCLUDE") {
        let folder = PathBuf::from(folder);
        return if folder.join(HEADER).is_file() {
            Ok(folder)
        } else {
            Err(format!(
                "KVFERRY_UCX_INCLUDE is {}, but there is no {HEADER} in it; set it to the folder that \
                 holds the folder ucp, or unset it to have UCX searched for",
                folder.display()
            ))
        };
    }
    let mut candidates = Vec::new();
    if let Ok(output) = Command::new("pkg-config").args(["--variable=includedir", "ucx"]).output() {
        let folder = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        if output.status.success() && !folder.is_empty() {
            candidates.push(PathBuf::from(folder));
        }
    }
    candidates.push(PathBuf::from("/usr/include"));
    candidates.push(PathBuf::from("/usr/local/include"));
    candidates.extend(packages.holding("libucx/include"));
    let mut too_old = Vec::new();
    for folder in candidates {
        if !folder.join(HEADER).is_file() {
            continue;
        }
        match check_version(&folder) {
            Ok(()) => return Ok(folder),
            Err(message) => too_old.push(message),
        }
    }
    too_old.push(
        "no headers of UCX 1.18 or newer found (looked in pkg-config's ucx, /usr/include, /usr/local/include and \
         the Python package libucx); run `pip install libucx-cu12` (in the virtual environment `.deps/venv`, the \
         active one, or the one of KVFERRY_PYTHON), or install UCX's development package, or set \
         KVFERRY_UCX_INCLUDE to the folder that holds ucp/api/ucp.h"
            .to_owned(),
    );
    Err(too_old.join("; "))
}

/// Refuses headers older than the oldest UCX that works.
pub fn check_version(headers: &Path) -> Result<(), String> {
    let path = headers.join("ucp/api/ucp_version.h");
    let text = fs::read_to_string(&path)
        .map_err(|error| format!("could not read the UCX header {}: {error}", path.display()))?;
    let number = |name: &str| {
        text.lines().find_map(|line| {
            let mut words = line.split_whitespace();
            (words.next() == Some("#define") && words.next() == Some(name))
                .then(|| words.next().and_then(|word| word.parse::<u32>().ok()))
                .flatten()
        })
    };
    match (number("UCP_API_MAJOR"), number("UCP_API_MINOR")) {
        (Some(major), Some(minor)) if (major, minor) >= OLDEST => Ok(()),
        (Some(major), Some(minor)) => Err(format!(
            "the UCX headers in {} are of version {major}.{minor}; kvferry needs {}.{} or newer",
            headers.display(),
            OLDEST.0,
            OLDEST.1
        )),
        _ => Err(format!("{} does not tell UCX's version", path.display())),
    }
}

/// The folder to name in LIBCLANG_PATH; `None` leaves the search to bindgen.
pub fn libclang(packages: &PythonPackages) -> Result<Option<PathBuf>, String> {
    if env::var_os("LIBCLANG_PATH").is_some() || system_has_libclang() {
        return Ok(None);
    }
    match packages.holding("clang/native") {
        Some(folder) => Ok(Some(folder)),
        None => Err("no libclang found (looked at LIBCLANG_PATH, the system's libraries and the Python package \
             libclang); run `pip install libclang` (in the virtual environment `.deps/venv`, the active one, or the \
             one of KVFERRY_PYTHON), or install the system's libclang"
            .to_owned()),
    }
}

fn system_has_libclang() -> bool {
    let in_folder = |folder: &Path| {
        fs::read_dir(folder).into_iter().flatten().flatten().any(|entry| {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            let versioned =
                |rest: &str| rest.starts_with(|letter: char| letter.is_ascii_digit()) && rest.contains(".so");
            // libclang-cpp is another library, and libclang-common-* and their like are packages' folders.
            name.starts_with("libclang.so") || name.strip_prefix("libclang-").is_some_and(versioned)
        })
    };
    let mut folders: Vec<PathBuf> =
        ["/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/local/lib64"].map(PathBuf::from).into();
    folders
        .push(PathBuf::from(format!("/usr/lib/{}-linux-gnu", env::var("CARGO_CFG_TARGET_ARCH").unwrap_or_default())));
    for entry in fs::read_dir("/usr/lib").into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with("llvm") {
            folders.push(entry.path().join("lib"));
        }
    }
    folders.iter().any(|folder| in_folder(folder))
}

/// The folders of the C compiler's and the C library's headers, in the compiler's order.
///
/// libclang from PyPI brings none of its own (stddef.h, stdbool.h, stdarg.h), so those of the C
/// compiler serve; UCX's public headers use nothing of them that clang would not understand.
pub fn system_includes() -> Result<Vec<PathBuf>, String> {
    let chosen = env::var("CC").ok();
    let compilers = chosen.iter().map(String::as_str).chain(["cc", "gcc", "clang"]);
    for compiler in compilers {
        let mut words = compiler.split_whitespace();
        let Some(program) = words.next() else { continue };
        let Ok(output) =
            Command::new(program).args(words).args(["-E", "-x", "c", "-v", "/dev/null"]).env("LC_ALL", "C").output()
        else {
            continue;
        };
        let text = String::from_utf8_lossy(&output.stderr);
        let folders: Vec<PathBuf> = text
            .lines()
            .skip_while(|line| !line.starts_with("#include <...>"))
            .skip(1)
            .take_while(|line| line.starts_with(' '))
            .map(|line| PathBuf::from(line.trim()))
            .filter(|folder| folder.is_dir())
            .collect();
        if !folders.is_empty() {
            return Ok(folders);
        }
    }
    Err("no C compiler found (looked at CC, cc, gcc and clang), and the headers of the C library are found through \
         one; install a C compiler such as gcc, or set CC"
        .to_owned())
}
