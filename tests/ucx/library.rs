//! How libucp is found and refused. A process opens one UCX, so each case runs in a process of its own: this test
//! binary again, with the case in its environment.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use kvferry::ucx::{Candidate, Context, ContextConfig, Fate, Library, LibrarySource, OLDEST, PATH_VARIABLE, Status};

const CASE: &str = "KVFERRY_TEST_CASE";
const HINT: &str = "KVFERRY_TEST_HINT";

/// Not a test by itself: opens UCX as the environment says and tells the outcome in one line.
#[test]
#[ignore = "started by the other tests"]
fn case() {
    let configured = env::var_os(CASE).filter(|path| !path.is_empty()).map(PathBuf::from);
    if let Some(hint) = env::var_os(HINT) {
        Library::hint(Path::new(&hint));
    }
    for Candidate { path, source, fate } in Library::candidates(configured.as_deref()) {
        let fate = match fate {
            Fate::Chosen { version } => format!("chosen {version}"),
            Fate::Refused { .. } => "refused".to_owned(),
            Fate::NotTried => "not tried".to_owned(),
        };
        println!("\n%{source:?} {} {fate}", path.display());
    }
    let opened = Library::open(configured.as_deref());
    match opened {
        Ok(library) => println!("\n@ok {:?} {}", library.info().source, library.info().path.display()),
        Err(error) => println!("\n@error {} {error}", error.status == Status::NO_LIBRARY),
    }
}

/// Runs `case`; `variables` are set, or unset where they are `None`. Gives what it printed.
fn run_case(configured: &str, variables: &[(&str, Option<&str>)]) -> String {
    run_case_of(&env::current_exe().unwrap(), configured, variables)
}

/// The same with this program as a file of another name.
fn run_case_of(program: &Path, configured: &str, variables: &[(&str, Option<&str>)]) -> String {
    let mut command = Command::new(program);
    command.args(["library::case", "--exact", "--nocapture", "--ignored"]).stdin(Stdio::null()).env(CASE, configured);
    for (name, value) in variables {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Whether and which library was opened.
fn outcome(configured: &str, variables: &[(&str, Option<&str>)]) -> String {
    let text = run_case(configured, variables);
    text.lines().find_map(|line| line.strip_prefix('@')).unwrap().to_owned()
}

/// What became of all candidates, in their order.
fn candidates(configured: &str, variables: &[(&str, Option<&str>)]) -> Vec<String> {
    let text = run_case(configured, variables);
    text.lines().filter_map(|line| line.strip_prefix('%')).map(str::to_owned).collect()
}

/// The path of the UCX that this machine's tests use.
fn usable() -> PathBuf {
    Library::open(None).unwrap().info().path.clone()
}

/// No place to look at but the system's.
const NOWHERE: [(&str, Option<&str>); 5] = [
    (PATH_VARIABLE, None),
    ("PYTHONPATH", None),
    ("VIRTUAL_ENV", None),
    ("CONDA_PREFIX", None),
    ("CARGO_MANIFEST_DIR", None),
];

fn nowhere_but<'a>(name: &'a str, value: &'a str) -> Vec<(&'a str, Option<&'a str>)> {
    NOWHERE.into_iter().filter(|(known, _)| *known != name).chain([(name, Some(value))]).collect()
}

#[test]
fn a_named_library_is_the_one_opened() {
    let path = usable();
    let text = path.to_str().unwrap();
    assert_eq!(outcome(text, &NOWHERE), format!("ok {:?} {text}", LibrarySource::Configured));
    assert_eq!(outcome("", &nowhere_but(PATH_VARIABLE, text)), format!("ok {:?} {text}", LibrarySource::Environment));
}

#[test]
fn a_wrong_path_is_told_with_the_fix() {
    let folder = env::temp_dir();
    let text_file = folder.join(format!("kvferry-not-a-library-{}", std::process::id()));
    std::fs::write(&text_file, "no library").unwrap();
    for path in [Path::new("/nowhere/libucp.so.0"), &folder, &text_file] {
        let path = path.to_str().unwrap();
        for told in [outcome(path, &NOWHERE), outcome("", &nowhere_but(PATH_VARIABLE, path))] {
            assert!(told.starts_with("error true"), "{told}");
            assert!(told.contains(path) && told.contains("kvferry-ucx"), "{told}");
        }
    }
    std::fs::remove_file(&text_file).unwrap();
}

#[test]
fn another_library_than_ucx_is_refused() {
    let libc = std::fs::read_to_string("/proc/self/maps")
        .unwrap()
        .lines()
        .find_map(|line| line.find('/').map(|at| line[at..].to_owned()).filter(|path| path.contains("/libc.so")))
        .unwrap();
    let told = outcome(&libc, &NOWHERE);
    assert!(told.starts_with("error true") && told.contains("lacks") && told.contains("ucp_init_version"), "{told}");
}

#[test]
fn a_python_package_is_found() {
    let path = usable();
    let Some(packages) = path.to_str().and_then(|path| path.split_once("/libucx/lib/")).map(|(front, _)| front) else {
        println!("skipped: the UCX of this machine is not that of the Python package libucx");
        return;
    };
    let told = outcome("", &nowhere_but("PYTHONPATH", packages));
    // A machine may have a UCX of its own, which comes first.
    let (system, package) =
        (format!("ok {:?}", LibrarySource::System), format!("ok {:?}", LibrarySource::PythonPackage));
    assert!(told.starts_with(&system) || told.starts_with(&package), "{told}");
    // <environment>/lib/python3.x/site-packages, unless the package lies somewhere else.
    if let (true, Some(environment)) = (packages.ends_with("/site-packages"), Path::new(packages).ancestors().nth(3)) {
        let told = outcome("", &nowhere_but("VIRTUAL_ENV", environment.to_str().unwrap()));
        assert!(told.starts_with(&system) || told.starts_with(&package), "{told}");
    }
}

#[test]
fn an_installed_library_leaves_the_shells_environment_alone() {
    let folder = env::temp_dir().join(format!("kvferry-installed-{}", std::process::id()));
    let [own, other] = ["own", "other"].map(|name| folder.join(name).join("lib/python3.11/site-packages"));
    std::fs::create_dir_all(own.join("kvferry")).unwrap();
    std::fs::create_dir_all(other.join("libucx")).unwrap();
    std::os::unix::fs::symlink(usable().parent().unwrap(), other.join("libucx/lib")).unwrap();
    let elsewhere = env::current_exe().unwrap();
    let installed = own.join("kvferry/program");
    std::fs::hard_link(&elsewhere, &installed).or_else(|_| std::fs::copy(&elsewhere, &installed).map(|_| ())).unwrap();
    let active = folder.join("other");
    let variables = nowhere_but("VIRTUAL_ENV", active.to_str().unwrap());
    for (program, expected) in [(&elsewhere, true), (&installed, false)] {
        let text = run_case_of(program, "", &variables);
        assert_eq!(text.lines().any(|line| line.starts_with("%PythonPackage ")), expected, "{text}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn the_package_kvferry_ucx_comes_before_the_systems() {
    let folder = env::temp_dir().join(format!("kvferry-own-package-{}", std::process::id()));
    std::fs::create_dir_all(folder.join("kvferry_ucx")).unwrap();
    std::os::unix::fs::symlink(usable().parent().unwrap(), folder.join("kvferry_ucx/lib")).unwrap();
    let own = folder.join("kvferry_ucx/lib/libucp.so.0");
    let found = candidates("", &nowhere_but("PYTHONPATH", folder.to_str().unwrap()));
    assert!(found[1].starts_with("OwnPackage ") && found[1].contains(" chosen "), "{found:?}");
    assert!(found[2].starts_with("System "), "{found:?}");
    // And where only the host's module path leads there.
    let hinted: Vec<_> = nowhere_but(PATH_VARIABLE, "").into_iter().chain([(HINT, own.to_str())]).collect();
    let found = candidates("", &hinted);
    assert!(found[1].starts_with("OwnPackage ") && found[1].contains(" chosen "), "{found:?}");
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn candidates_are_told_in_their_order() {
    let path = usable();
    let text = path.to_str().unwrap();
    let found = candidates(text, &NOWHERE);
    assert!(found[0].starts_with(&format!("Configured {text} chosen ")), "{found:?}");
    assert!(found.len() > 2 && found[1..].iter().all(|one| one.ends_with("not tried")), "{found:?}");

    let found = candidates("", &nowhere_but(PATH_VARIABLE, "/nowhere/libucp.so.0"));
    assert_eq!(found[0], "Environment /nowhere/libucp.so.0 refused");
    assert!(found[1..].iter().all(|one| one.ends_with("not tried")), "{found:?}");

    let found = candidates("", &NOWHERE);
    assert_eq!(found[0], "AlreadyLoaded libucp.so.0 refused");
    assert!(found[1].starts_with("System "), "{found:?}");
}

#[test]
fn a_hint_is_the_last_candidate() {
    // A path that the search does not come by itself: a link to the folder of a usable one.
    let folder = env::temp_dir().join(format!("kvferry-hint-{}", std::process::id()));
    std::os::unix::fs::symlink(usable().parent().unwrap(), &folder).unwrap();
    let hint = folder.join("libucp.so.0");
    let with = |name, value| nowhere_but(name, value).into_iter().chain([(HINT, hint.to_str())]).collect::<Vec<_>>();

    let found = candidates("", &with(PATH_VARIABLE, "/nowhere/libucp.so.0"));
    assert_eq!(found.last().unwrap(), &format!("PythonPackage {} not tried", hint.display()));

    let told = outcome("", &with(PATH_VARIABLE, ""));
    let (system, package) =
        (format!("ok {:?}", LibrarySource::System), format!("ok {:?}", LibrarySource::PythonPackage));
    assert!(told.starts_with(&system) || told.starts_with(&package), "{told}");
    std::fs::remove_file(&folder).unwrap();

    // Without its file it is no candidate.
    let found = candidates("", &with(PATH_VARIABLE, "/nowhere/libucp.so.0"));
    assert!(!found.iter().any(|one| one.contains(hint.to_str().unwrap())), "{found:?}");
}

#[test]
fn a_context_tells_its_transports_and_unknown_variables() {
    let config = ContextConfig { tls: Some("tcp,self".to_owned()), ..ContextConfig::default() };
    let context = Context::new(&config).unwrap();
    let resources = context.resources();
    assert!(resources.iter().any(|one| one.transport == "tcp" && one.device == "lo"), "{resources:?}");
    assert!(resources.iter().all(|one| ["tcp", "self"].contains(&&*one.transport)), "{resources:?}");
}

#[test]
fn no_ucx_is_an_error_with_the_fix() {
    let told = outcome("", &NOWHERE);
    if told.starts_with(&format!("ok {:?}", LibrarySource::System)) {
        println!("skipped: this machine's system has a UCX, so there is always one");
        return;
    }
    assert!(told.starts_with("error true"), "{told}");
    assert!(told.contains("kvferry-ucx") && told.contains(PATH_VARIABLE), "{told}");
}

#[test]
fn the_oldest_version_is_met_and_a_context_uses_the_opened_library() {
    let library = Library::open(None).unwrap();
    let (major, minor, _) = library.info().number;
    assert!((major, minor) >= OLDEST);
    let config = ContextConfig { tls: Some("tcp".to_owned()), ..ContextConfig::default() };
    assert!(std::ptr::eq(Context::new(&config).unwrap().library(), library));
    assert_eq!(Library::others(), Vec::<PathBuf>::new());
}
