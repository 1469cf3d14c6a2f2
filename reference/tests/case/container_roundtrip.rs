//! Written files are read back, by this reader and by the safetensors crate.

use std::collections::{BTreeMap, HashMap};

use marlinspike::container::{
    Container, ContainerWriter, Header, TensorSpec, WriteError, write_container,
};
use marlinspike::num::tensor::{DType, Tensor};
use proptest::prelude::*;

fn metadata() -> BTreeMap<String, String> {
    BTreeMap::from([("format".into(), "pt".into()), ("with \"quotes\"".into(), "é\n".into())])
}

fn tensors() -> Vec<Tensor<'static>> {
    let t = |name: &str, dtype, shape: Vec<usize>, bytes: Vec<u8>| {
        Tensor::new(name, dtype, shape, bytes).unwrap()
    };
    vec![
        t("bytes", DType::U8, vec![3], vec![1, 2, 3]),
        t("scalar", DType::F32, vec![], vec![0, 0, 128, 63]),
        t("empty", DType::BF16, vec![4, 0], vec![]),
        t("words", DType::I32, vec![1, 2], (0..8).collect()),
        t("e8m0", DType::F8E8M0, vec![2], vec![127, 128]),
        t("e4m3", DType::F8E4M3, vec![1], vec![0x38]),
        t("half", DType::F16, vec![2], vec![0, 60, 0, 64]),
        t("long", DType::I64, vec![1], vec![9; 8]),
    ]
}

#[test]
fn written_and_read_back() {
    let bytes = write_container(&tensors(), &metadata(), Vec::new()).unwrap();
    let container = Container::parse(&bytes).unwrap();
    assert_eq!(container.metadata(), &metadata());
    assert_eq!(container.header().data_start() % 8, 0);
    assert_eq!(container.len(), 8);
    for t in tensors() {
        assert_eq!(container.tensor(t.name()).unwrap(), t);
        // Wider types come first, so every tensor is aligned in the file.
        let start = container.get(t.name()).unwrap().file_range().start;
        assert!(start.is_multiple_of(t.dtype().bytes() as u64), "{}", t.name());
    }
    let starts: Vec<_> =
        container.header().entries().iter().map(|e| e.file_range().start).collect();
    assert!(starts.is_sorted());
    // Same content in another order, same bytes.
    let mut reversed = tensors();
    reversed.reverse();
    assert_eq!(write_container(&reversed, &metadata(), Vec::new()).unwrap(), bytes);
}

#[test]
fn the_ecosystem_reads_what_we_write() {
    let bytes = write_container(&tensors(), &metadata(), Vec::new()).unwrap();
    let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(theirs.len(), tensors().len());
    for t in tensors() {
        let view = theirs.tensor(t.name()).unwrap();
        assert_eq!((view.shape(), view.data()), (t.shape(), t.bytes()));
        assert_eq!(
            format!("{:?}", view.dtype()).replace('_', ""),
            t.dtype().name().replace('_', "")
        );
    }
    let (_, meta) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let expected: HashMap<String, String> = metadata().into_iter().collect();
    assert_eq!(meta.metadata().as_ref(), Some(&expected));
}

#[test]
fn we_read_what_the_ecosystem_writes() {
    let data = [1u8, 2, 3, 4, 5, 6, 7, 8];
    let view = |dtype, shape: &[usize], n| {
        safetensors::tensor::TensorView::new(dtype, shape.to_vec(), &data[..n]).unwrap()
    };
    use safetensors::Dtype;
    let all = [
        ("x", view(Dtype::I32, &[2], 8)),
        ("y", view(Dtype::BF16, &[1, 3], 6)),
        ("z", view(Dtype::U8, &[0], 0)),
    ];
    let bytes = safetensors::serialize(all, None).unwrap();
    let container = Container::parse(&bytes).unwrap();
    assert_eq!(container.tensor("x").unwrap().elements::<i32>().len(), 2);
    assert_eq!(container.tensor("y").unwrap().shape(), [1, 3]);
    assert_eq!(container.tensor("y").unwrap().bytes(), &data[..6]);
    assert!(container.tensor("z").unwrap().is_empty());
    assert!(container.metadata().is_empty());
}

#[test]
fn the_header_alone_places_every_tensor() {
    let bytes = write_container(&tensors(), &metadata(), Vec::new()).unwrap();
    let needed = Header::needed(&bytes[..8], bytes.len() as u64).unwrap();
    let header = Header::parse(&bytes[..needed as usize], bytes.len() as u64).unwrap();
    assert_eq!(&header, Container::parse(&bytes).unwrap().header());
    for t in tensors() {
        let range = header.get(t.name()).unwrap().file_range();
        assert_eq!(&bytes[range.start as usize..range.end as usize], t.bytes());
    }
}

fn specs() -> Vec<TensorSpec> {
    tensors().iter().map(TensorSpec::from).collect()
}

#[test]
fn streamed_in_the_announced_order() {
    let mut writer = ContainerWriter::new(Vec::new(), &specs(), &metadata()).unwrap();
    for t in tensors().iter().filter(|t| !t.is_empty()) {
        if t.name() == "words" {
            writer.write_part("words", &t.bytes()[..3]).unwrap();
            writer.write_part("words", &t.bytes()[3..]).unwrap();
        } else {
            writer.write_tensor(t.name(), t.bytes()).unwrap();
        }
    }
    let bytes = writer.finish().unwrap();
    let container = Container::parse(&bytes).unwrap();
    for t in tensors() {
        assert_eq!(container.tensor(t.name()).unwrap(), t);
    }
    assert!(
        container
            .names()
            .filter(|n| *n != "empty")
            .eq(tensors().iter().map(Tensor::name).filter(|n| *n != "empty"))
    );
}

#[test]
fn the_writer_refuses_what_no_reader_could_use() {
    let none = BTreeMap::new();
    let spec =
        |name: &str, shape: Vec<usize>| TensorSpec { name: name.into(), dtype: DType::F32, shape };
    let new = |specs: &[TensorSpec]| ContainerWriter::new(Vec::new(), specs, &none);
    assert!(matches!(
        new(&[spec("a", vec![1]), spec("a", vec![2])]),
        Err(WriteError::DuplicateTensor { tensor }) if tensor == "a"
    ));
    assert!(matches!(new(&[spec("__metadata__", vec![1])]), Err(WriteError::ReservedName)));
    assert!(matches!(
        new(&[spec("a", vec![usize::MAX, 2])]),
        Err(WriteError::ShapeOverflow { .. })
    ));
    assert!(matches!(
        new(&[spec("a", vec![1 << 60]), spec("b", vec![1 << 60])]),
        Err(WriteError::ShapeOverflow { tensor, .. }) if tensor == "b"
    ));
    let mut writer = new(&[spec("a", vec![2]), spec("b", vec![1])]).unwrap();
    assert!(matches!(
        writer.write_tensor("b", &[0; 4]),
        Err(WriteError::WrongTensor { found, expected }) if found == "b" && expected == "`a`"
    ));
    for wrong in [0, 7, 9] {
        assert!(matches!(
            writer.write_tensor("a", &vec![0; wrong]),
            Err(WriteError::WrongLength { found, expected: 8, .. }) if found == wrong as u64
        ));
    }
    writer.write_part("a", &[0; 6]).unwrap();
    assert!(matches!(
        writer.write_part("a", &[0; 3]),
        Err(WriteError::WrongLength { found: 3, expected: 2, .. })
    ));
    writer.write_part("a", &[0; 2]).unwrap();
    writer.write_tensor("b", &[0; 4]).unwrap();
    assert!(matches!(
        writer.write_tensor("c", &[]),
        Err(WriteError::WrongTensor { expected, .. }) if expected == "the end"
    ));
    writer.finish().unwrap();
    let unfinished = new(&[spec("a", vec![2])]).unwrap();
    assert!(matches!(
        unfinished.finish(),
        Err(WriteError::Unfinished { tensor }) if tensor == "a"
    ));
}

proptest! {
    #[test]
    fn any_set_of_tensors(
        parts in proptest::collection::btree_map(
            "\\PC{1,12}",
            (0..DType::ALL.len(), proptest::collection::vec(0usize..4, 0..4)),
            0..8,
        )
    ) {
        let tensors: Vec<_> = parts
            .iter()
            .filter(|(name, _)| *name != "__metadata__")
            .map(|(name, (dtype, shape))| {
                let dtype = DType::ALL[*dtype];
                let len = shape.iter().product::<usize>() * dtype.bytes();
                let bytes: Vec<u8> = (0..len).map(|i| i as u8).collect();
                Tensor::new(name.as_str(), dtype, shape.clone(), bytes).unwrap()
            })
            .collect();
        let bytes = write_container(&tensors, &BTreeMap::new(), Vec::new()).unwrap();
        let container = Container::parse(&bytes).unwrap();
        prop_assert_eq!(container.len(), tensors.len());
        for t in &tensors {
            prop_assert_eq!(&container.tensor(t.name()).unwrap(), t);
        }
        prop_assert!(safetensors::SafeTensors::deserialize(&bytes).is_ok());
    }
}
