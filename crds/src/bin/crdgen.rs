//! Writes the CustomResourceDefinitions: `crds/generated/` for `kubectl apply`, `charts/baton-crds/templates/` for Helm.

use std::path::Path;

fn main() -> std::io::Result<()> {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for (file, text) in baton_crds::crd::files() {
        let path = repository.join(file);
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        std::fs::write(path, text)?;
    }
    Ok(())
}
