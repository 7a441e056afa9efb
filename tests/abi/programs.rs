//! Compiles the C programs of `tests/abi` and runs them: plain, with the address sanitizer, and under valgrind.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::skip::skipped;

/// No run may take longer; valgrind beside other tests takes minutes.
const GENEROUS: Duration = Duration::from_secs(1200);

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A folder with the library under the names that the linker and the loader ask for.
fn library_folder(test: &str) -> PathBuf {
    let tmp = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let profile = if cfg!(debug_assertions) { "debug" } else { "release" };
    let built = tmp.parent().unwrap().join(profile).join("deps/libkvferry.so");
    assert!(built.is_file(), "{} was not built", built.display());
    let folder = tmp.join(format!("abi-{test}"));
    fs::create_dir_all(&folder).unwrap();
    for name in ["libkvferry.so", "libkvferry.so.1"] {
        let link = folder.join(name);
        let _ = fs::remove_file(&link);
        std::os::unix::fs::symlink(&built, &link).unwrap();
    }
    folder
}

/// Compiles `tests/abi/NAME.c`; `Err` is what the compiler said.
fn compile(name: &str, folder: &Path, flags: &[&str]) -> Result<PathBuf, String> {
    let program = folder.join(name);
    let out = Command::new("cc")
        .args(["-std=c11", "-g", "-Wall", "-Wextra", "-Werror", "-pedantic"])
        .args(flags)
        .arg("-I")
        .arg(root().join("include"))
        .arg(root().join(format!("tests/abi/{name}.c")))
        .arg("-L")
        .arg(folder)
        .arg(format!("-Wl,-rpath,{}", folder.display()))
        .args(["-lkvferry", "-pthread", "-o"])
        .arg(&program)
        .output()
        .map_err(|e| format!("cc cannot be run: {e}"))?;
    if out.status.success() { Ok(program) } else { Err(String::from_utf8_lossy(&out.stderr).into_owned()) }
}

fn kill_group(child: &mut Child) {
    // The test program starts itself again: both are in a group of their own.
    let pid = rustix::process::Pid::from_child(child);
    let _ = rustix::process::kill_process_group(pid, rustix::process::Signal::KILL);
    let _ = child.wait();
}

/// Runs to the end, or kills it after [`GENEROUS`].
fn run(command: &mut Command) -> Output {
    use std::os::unix::process::CommandExt;
    let out = tempfile_of(command);
    let mut child = command
        .process_group(0)
        // Slow under valgrind.
        .envs([("KVFERRY_CONNECT_TIMEOUT_MS", "120000"), ("KVFERRY_CANCEL_GRACE_MS", "60000")])
        .stdin(Stdio::null())
        .stdout(fs::File::create(&out.0).unwrap())
        .stderr(fs::File::create(&out.1).unwrap())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + GENEROUS;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > deadline {
            kill_group(&mut child);
            panic!("{command:?} did not end:\n{}", fs::read_to_string(&out.1).unwrap_or_default());
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    Output { status, stdout: fs::read(&out.0).unwrap(), stderr: fs::read(&out.1).unwrap() }
}

fn tempfile_of(command: &Command) -> (PathBuf, PathBuf) {
    let args: Vec<_> = command.get_args().map(|a| a.to_string_lossy().replace(['/', '=', '%'], "_")).collect();
    let name: String = format!("{}-{}", std::process::id(), args.join("-")).chars().take(120).collect();
    let folder = Path::new(command.get_program()).parent().filter(|p| p.is_absolute());
    let folder = folder.unwrap_or(Path::new(env!("CARGO_TARGET_TMPDIR")));
    (folder.join(format!("{name}.out")), folder.join(format!("{name}.err")))
}

/// A program of `tests/abi`, the arguments that it is run with, and what it prints at the end.
struct Program {
    name: &'static str,
    arguments: &'static [&'static str],
    /// With the address sanitizer.
    sanitized: &'static str,
    /// Under valgrind.
    checked: &'static [&'static str],
    says: &'static str,
}

const PROGRAMS: [Program; 4] = [
    Program {
        name: "agent",
        arguments: &["tcp", "shm"],
        sanitized: "shm",
        checked: &["tcp", "shm"],
        says: "every byte was right",
    },
    Program {
        name: "scheduler",
        arguments: &[""],
        sanitized: "",
        checked: &[""],
        says: "every conversation was evicted in its turn",
    },
    Program {
        name: "fork",
        arguments: &["300"],
        sanitized: "20",
        // It would take what threads of the parent have on their stacks for lost memory of the child.
        checked: &[],
        says: "every forked process was answered",
    },
    Program {
        name: "log",
        arguments: &[""],
        sanitized: "",
        checked: &[""],
        says: "every call from the callback was refused",
    },
];

fn must_pass(out: &Output, program: &Program, what: &str) {
    let (stdout, stderr) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{}, {what}: {}\n{stdout}\n{stderr}", program.name, out.status);
    assert!(stdout.contains(program.says), "{}, {what}:\n{stdout}\n{stderr}", program.name);
}

#[test]
fn programs_in_c_find_what_they_expect() {
    let folder = library_folder("plain");
    for program in &PROGRAMS {
        let compiled = compile(program.name, &folder, &[]).unwrap();
        for argument in program.arguments {
            must_pass(&run(Command::new(&compiled).arg(argument)), program, argument);
        }
    }
}

#[test]
fn the_address_sanitizer_finds_nothing() {
    let folder = library_folder("asan");
    for (number, program) in PROGRAMS.iter().enumerate() {
        let compiled = match compile(program.name, &folder, &["-fsanitize=address", "-fno-omit-frame-pointer"]) {
            Ok(compiled) => compiled,
            Err(reason) => {
                assert_eq!(number, 0, "{} does not compile: {reason}", program.name);
                skipped(&format!("the C compiler has no address sanitizer: {reason}"));
                return;
            }
        };
        let out = run(Command::new(&compiled)
            .arg(program.sanitized)
            .env("ASAN_OPTIONS", "detect_leaks=1:abort_on_error=0:exitcode=23"));
        must_pass(&out, program, "address sanitizer");
    }
}

#[test]
fn valgrind_finds_nothing() {
    if !Command::new("valgrind").arg("--version").output().is_ok_and(|out| out.status.success()) {
        skipped("valgrind is not installed");
        return;
    }
    let folder = library_folder("valgrind");
    for program in &PROGRAMS {
        let compiled = compile(program.name, &folder, &[]).unwrap();
        for argument in program.checked {
            let out = run(Command::new("valgrind")
                .args(["--quiet", "--trace-children=yes", "--error-exitcode=23", "--leak-check=full"])
                .args(["--errors-for-leak-kinds=definite", "--show-leak-kinds=definite", "--num-callers=30"])
                .arg(format!("--suppressions={}", root().join("tests/abi/valgrind.supp").display()))
                .arg(&compiled)
                .arg(argument));
            must_pass(&out, program, &format!("valgrind, {argument}"));
        }
    }
}
