//! The committed CustomResourceDefinitions are those that the schema's tables make.

use std::path::Path;

use baton_crds::crd;

const COMMAND: &str = "cargo run -p baton-crds --bin crdgen";

#[test]
fn committed_files_are_those_that_are_made() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for (file, made) in crd::files() {
        let committed = std::fs::read_to_string(repository.join(&file)).unwrap_or_default();
        assert!(
            committed == made,
            "{file} is not what crds/src/schema/ makes: run `{COMMAND}` and commit what it writes"
        );
    }
}

/// A file that is no longer made would be applied for ever.
#[test]
fn no_other_file_is_beside_them() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let made: Vec<String> = crd::files().into_iter().map(|(file, _)| file).collect();
    for folder in ["crds/generated", "charts/baton-crds/templates"] {
        for entry in std::fs::read_dir(repository.join(folder)).unwrap() {
            let file = format!("{folder}/{}", entry.unwrap().file_name().to_string_lossy());
            assert!(made.contains(&file), "{file} is made by nothing: remove it");
        }
    }
}

#[test]
fn what_is_written_reads_back_as_the_definition() {
    let files = crd::files();
    for (name, definition) in crd::definitions() {
        let plural = name.split('.').next().unwrap();
        let (_, text) = files
            .iter()
            .find(|(file, _)| *file == format!("crds/generated/{plural}.yaml"))
            .unwrap();
        let read: serde_json::Value = serde_saphyr::from_str(text).unwrap();
        assert_eq!(read, definition, "{name}");
    }
}
