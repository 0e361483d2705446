//! Writes the seeds of every target into folders under the one that is given.

use std::path::Path;
use std::process::ExitCode;
use std::{fs, io};

use baton_fuzz::TARGETS;

fn write(folder: &Path) -> io::Result<()> {
    for target in TARGETS {
        let folder = folder.join(target.name);
        fs::create_dir_all(&folder)?;
        for (name, input) in (target.seeds)() {
            fs::write(folder.join(name), input)?;
        }
    }
    Ok(())
}

fn main() -> io::Result<ExitCode> {
    let Some(folder) = std::env::args_os().nth(1) else {
        io::Write::write_all(
            &mut io::stderr(),
            b"give the folder to write the seeds to\n",
        )?;
        return Ok(ExitCode::from(2));
    };
    write(Path::new(&folder))?;
    Ok(ExitCode::SUCCESS)
}
