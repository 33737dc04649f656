#include "proto/checkpoint/meaning.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/struct.pb.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "proto/checkpoint/file_digest.h"
#include "proto/checkpoint/manifest.h"
#include "proto/checkpoint/safetensors_header.h"

namespace ballast {
namespace {

constexpr uint64_t kShardBytes = uint64_t{1} << 30;  // as LayOutCheckpoint
constexpr int64_t kMostElements = int64_t{1} << 40;  // of a tensor
constexpr int kAveragePlanes = 2;                    // of an average of weights

absl::Status WrongIn(const std::string& path, const std::string& how) {
  return absl::DataLossError(absl::StrCat(path, " is wrong in itself: ", how));
}

std::string Text(const std::string& path, uint64_t bytes) {
  std::string text(bytes, '\0');
  std::ifstream file(path, std::ios::binary);
  file.read(text.data(), static_cast<std::streamsize>(bytes));
  text.resize(static_cast<size_t>(std::max<std::streamsize>(file.gcount(), 0)));
  return text;
}

// A plane in a header: of one tensor, or several tensors that share a group.
struct StoredPlane {
  std::string name, dtype;
  bool operator==(const StoredPlane&) const = default;
};

std::string ToText(const std::vector<StoredPlane>& planes) {
  std::string text;
  for (const StoredPlane& plane : planes)
    absl::StrAppend(&text, text.empty() ? "" : ", ", plane.name, " ", plane.dtype);
  return text.empty() ? "none" : text;
}

// The plane of a master format that the model's files have.
struct FirstPlane {
  const char* dtype;
  uint64_t bytes;  // of a word
};
FirstPlane FirstPlaneOf(absl::string_view master) {
  if (master == "fp32") return {"F32", 4};
  if (master == "mcf8") return {"F8_E4M3", 1};
  return {"BF16", 2};
}

uint64_t WordBytes(absl::string_view dtype) {
  if (dtype == "U8") return 1;
  if (dtype == "U16") return 2;
  return dtype == "U32" ? 4 : 0;
}

std::string NameOfShard(absl::string_view kind, size_t number, size_t count) {
  return absl::StrFormat("%s-%05d-of-%05d.safetensors", kind, number, count);
}

// The headers of one kind of file, model or optimizer, as their tensors come: a file ends with the tensor that takes it
// past 1 GiB of data.
class Shards {
 public:
  // The number of its file, from 1 on.
  size_t Add(absl::string_view name, absl::string_view dtype, absl::Span<const uint64_t> shape, uint64_t bytes) {
    if (open_.empty() || open_.back().data_bytes() > kShardBytes) open_.emplace_back();
    open_.back().Add(name, dtype, shape, bytes);
    return open_.size();
  }
  // By the name of the file: its header, and the bytes of data behind it.
  std::map<std::string, std::pair<std::string, uint64_t>> Finish(absl::string_view kind) && {
    std::map<std::string, std::pair<std::string, uint64_t>> files;
    for (size_t s = 0; s < open_.size(); ++s) {
      const uint64_t bytes = open_[s].data_bytes();
      files[NameOfShard(kind, s + 1, open_.size())] = {std::move(open_[s]).Finish(), bytes};
    }
    return files;
  }

 private:
  std::vector<SafetensorsHeader> open_;
};

class MeaningCheck {
 public:
  MeaningCheck(std::string folder, const v1::CheckpointManifest& manifest)
      : folder_(std::move(folder)), manifest_(manifest) {}

  absl::Status Check() {
    for (const auto check : {&MeaningCheck::CheckSpec, &MeaningCheck::CheckTensors, &MeaningCheck::CheckModel,
                             &MeaningCheck::CheckOptimizer, &MeaningCheck::CheckIndex, &MeaningCheck::CheckRun}) {
      if (absl::Status status = (this->*check)(); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

 private:
  absl::Status CheckSpec();
  absl::Status CheckTensors();
  absl::Status CheckModel();
  absl::Status CheckOptimizer();
  absl::Status CheckIndex();
  absl::Status CheckRun();
  absl::Status CheckClientStates(const v1::CheckpointedRun& run);
  // What the next plane of the tensor is in the header's text, which begins there; false: it is another tensor's.
  absl::StatusOr<bool> TakePlane(size_t tensor, const std::string& path, absl::string_view* text, Shards* shards);
  absl::Status CheckShards(absl::string_view kind, Shards shards);

  std::string PathOf(absl::string_view name) const { return absl::StrCat(folder_, "/", name); }
  std::string ReadFile(absl::string_view name) const {
    const v1::CheckpointFile* const file = FindFile(manifest_, name);
    return file == nullptr ? "" : Text(PathOf(name), file->bytes());
  }
  // The JSON of a safetensors file's header, with its padding; empty: it has none.
  std::string ReadHeader(const v1::CheckpointFile& file) const;
  std::vector<const v1::CheckpointFile*> FilesOf(absl::string_view kind) const;

  const std::string folder_;
  const v1::CheckpointManifest& manifest_;
  v1::RunSpec spec_;
  // By tensor:
  std::vector<uint64_t> elements_;
  std::vector<size_t> model_files_;  // in which of them its weights are, from 1 on
  std::vector<std::vector<StoredPlane>> planes_;
};

std::string MeaningCheck::ReadHeader(const v1::CheckpointFile& file) const {
  const std::string begin = Text(PathOf(file.name()), std::min<uint64_t>(8, file.bytes()));
  if (begin.size() < 8) return "";
  uint64_t length = 0;
  for (size_t i = 8; i-- > 0;) length = length << 8 | static_cast<unsigned char>(begin[i]);
  return length > file.bytes() - 8 ? "" : Text(PathOf(file.name()), 8 + length).substr(8);
}

std::vector<const v1::CheckpointFile*> MeaningCheck::FilesOf(absl::string_view kind) const {
  std::vector<const v1::CheckpointFile*> files;
  for (const v1::CheckpointFile& file : manifest_.files()) {
    if (absl::StartsWith(file.name(), absl::StrCat(kind, "-"))) files.push_back(&file);
  }
  return files;
}

absl::Status MeaningCheck::CheckSpec() {
  const std::string path = PathOf(kSpecName);
  if (absl::Status s = FromJson(ReadFile(kSpecName), path, &spec_); !s.ok()) return s;
  std::string canonical;
  {
    google::protobuf::io::StringOutputStream stream(&canonical);
    google::protobuf::io::CodedOutputStream coded(&stream);
    coded.SetSerializationDeterministic(true);
    spec_.SerializeToCodedStream(&coded);
  }
  if (DigestOf("", canonical).sha256() != manifest_.spec_sha256()) {
    return WrongIn(path, "it is not the spec that the manifest has the hash of (specSha256)");
  }
  if (spec_.run_id() == manifest_.run_id()) return absl::OkStatus();
  return WrongIn(
      path, absl::StrCat("it is of run '", spec_.run_id(), "', and the manifest of run '", manifest_.run_id(), "'"));
}

absl::Status MeaningCheck::CheckTensors() {
  const std::string path = PathOf(kSpecName);
  if (spec_.tensors_size() == 0) return WrongIn(path, "it has no tensors");
  std::set<std::string> names;
  for (const v1::TensorSpec& tensor : spec_.tensors()) {
    const std::string said = absl::StrCat("tensor '", tensor.name(), "' ");
    if (tensor.name().empty() || tensor.name() == kReservedTensorName || !names.insert(tensor.name()).second) {
      return WrongIn(path, said + "has a name that no tensor can have, or another one has, too");
    }
    if (tensor.group() >= static_cast<uint32_t>(spec_.groups_size())) return WrongIn(path, said + "is of no group");
    int64_t elements = 1;
    for (const int64_t size : tensor.shape()) {
      if (size <= 0 || size > kMostElements / elements) return WrongIn(path, said + "has a shape that none can have");
      elements *= size;
    }
    elements_.push_back(static_cast<uint64_t>(elements));
  }
  return absl::OkStatus();
}

absl::Status MeaningCheck::CheckShards(absl::string_view kind, Shards shards) {
  const auto wanted = std::move(shards).Finish(kind);
  for (const v1::CheckpointFile* const file : FilesOf(kind)) {
    if (wanted.contains(file->name())) continue;
    return WrongIn(PathOf(file->name()), absl::StrCat("the tensors of ", kSpecName, " lead to no such file"));
  }
  for (const auto& [name, content] : wanted) {
    const auto& [header, bytes] = content;
    const v1::CheckpointFile* const file = FindFile(manifest_, name);
    if (file == nullptr) return WrongIn(PathOf(kManifestName), absl::StrCat("it lists no ", name));
    if (file->bytes() != header.size() + bytes) {
      return WrongIn(PathOf(name), absl::StrCat("it has ", file->bytes(), " bytes, and ", kSpecName, " leads to ",
                                                header.size() + bytes));
    }
    if (Text(PathOf(name), header.size()) == header) continue;
    return WrongIn(PathOf(name), absl::StrCat("its header is not the one that ", kSpecName, " leads to"));
  }
  return absl::OkStatus();
}

absl::Status MeaningCheck::CheckModel() {
  Shards shards;
  for (int t = 0; t < spec_.tensors_size(); ++t) {
    const v1::TensorSpec& tensor = spec_.tensors(t);
    const FirstPlane plane = FirstPlaneOf(spec_.groups(static_cast<int>(tensor.group())).master());
    const std::vector<uint64_t> shape(tensor.shape().begin(), tensor.shape().end());
    const uint64_t bytes = elements_[static_cast<size_t>(t)] * plane.bytes;
    model_files_.push_back(shards.Add(tensor.name(), plane.dtype, shape, bytes));
  }
  return CheckShards("model", std::move(shards));
}

absl::StatusOr<bool> MeaningCheck::TakePlane(size_t tensor, const std::string& path, absl::string_view* text,
                                             Shards* shards) {
  const v1::TensorSpec& spec = spec_.tensors(static_cast<int>(tensor));
  std::string begin = absl::StrCat(",", QuotedName(spec.name()));
  begin.back() = '/';  // in place of the closing quote
  absl::string_view rest = *text;
  if (!absl::ConsumePrefix(&rest, begin)) return false;
  const size_t name_end = rest.find('"');
  const absl::string_view name = rest.substr(0, name_end);
  // Of another tensor, whose name begins with this one's.
  if (name_end == absl::string_view::npos || absl::StrContains(name, "/")) return false;
  rest.remove_prefix(name_end);
  constexpr absl::string_view kDtype = "\":{\"dtype\":\"", kShape = "\",\"shape\":[", kOffsets = "],\"data_offsets\":[";
  const auto wrong = [&] {
    return WrongIn(path, absl::StrCat("of '", spec.name(), "/", name, "' its header is not as it must be"));
  };
  if (!absl::ConsumePrefix(&rest, kDtype)) return wrong();
  const absl::string_view dtype = rest.substr(0, std::min(rest.find('"'), rest.size()));
  rest.remove_prefix(dtype.size());
  const uint64_t word = WordBytes(dtype);
  if (word == 0 || !absl::ConsumePrefix(&rest, kShape)) return wrong();
  const absl::string_view shape = rest.substr(0, std::min(rest.find(']'), rest.size()));
  rest.remove_prefix(shape.size());
  std::vector<uint64_t> sizes(spec.shape().begin(), spec.shape().end());
  uint64_t words = elements_[tensor];
  if (shape != absl::StrJoin(sizes, ",")) {  // one word for so many elements
    if (!absl::SimpleAtoi(shape, &words) || words == 0 || words > elements_[tensor]) return wrong();
    sizes = {words};
  }
  const size_t end = rest.find('}');
  if (end == absl::string_view::npos || !absl::StartsWith(rest, kOffsets)) return wrong();
  rest.remove_prefix(end + 1);  // that the offsets are right is seen when the header is compared
  shards->Add(absl::StrCat(spec.name(), "/", name), dtype, sizes, words * word);
  planes_[tensor].push_back({std::string(name), std::string(dtype)});
  *text = rest;
  return true;
}

absl::Status MeaningCheck::CheckOptimizer() {
  planes_.resize(elements_.size());
  Shards shards;
  size_t tensor = 0;
  for (const v1::CheckpointFile* const file : FilesOf("optimizer")) {
    const std::string path = PathOf(file->name()), header = ReadHeader(*file);
    absl::string_view text = header;
    if (!absl::ConsumePrefix(&text, SafetensorsHeader::kBegin))
      return WrongIn(path, "it has no header of a checkpoint's");
    while (absl::StartsWith(text, ",")) {
      const absl::StatusOr<bool> taken = TakePlane(tensor, path, &text, &shards);
      if (!taken.ok()) return taken.status();
      if (!*taken && ++tensor == elements_.size()) {
        return WrongIn(path, absl::StrCat("its header has a tensor that ", kSpecName,
                                          " has not, or not there: ", text.substr(1, 80)));
      }
    }
  }
  if (absl::Status status = CheckShards("optimizer", std::move(shards)); !status.ok()) return status;
  std::map<uint32_t, size_t> first_of;  // by group: its first tensor
  for (size_t t = 0; t < planes_.size(); ++t) {
    const v1::TensorSpec& spec = spec_.tensors(static_cast<int>(t));
    const size_t first = first_of.emplace(spec.group(), t).first->second;
    const auto averages = std::count_if(planes_[t].begin(), planes_[t].end(), [](const StoredPlane& plane) {
      return absl::StartsWith(plane.name, "average");
    });
    if (averages != kAveragePlanes * spec_.averages_size()) {
      return WrongIn(folder_,
                     absl::StrCat("tensor '", spec.name(), "' has ", averages, " planes of averages, and the run ",
                                  spec_.averages_size(), " averages, of ", kAveragePlanes, " planes each"));
    }
    if (planes_[t].empty()) {  // every rule has a moment
      return WrongIn(folder_, absl::StrCat("no optimizer file has a plane of '", spec.name(), "'"));
    }
    if (planes_[t] == planes_[first]) continue;
    return WrongIn(folder_, absl::StrCat("tensor '", spec.name(), "' has the planes ", ToText(planes_[t]), ", and '",
                                         spec_.tensors(static_cast<int>(first)).name(), "' of the same group ",
                                         ToText(planes_[first])));
  }
  return absl::OkStatus();
}

absl::Status MeaningCheck::CheckIndex() {
  if (FindFile(manifest_, kIndexName) == nullptr) {
    return WrongIn(PathOf(kManifestName), absl::StrCat("it lists no ", kIndexName));
  }
  google::protobuf::Struct index;
  const std::string path = PathOf(kIndexName);
  if (absl::Status s = FromJson(ReadFile(kIndexName), path, &index); !s.ok()) return s;
  const auto& map = index.fields().contains("weight_map") ? index.fields().at("weight_map").struct_value().fields()
                                                          : google::protobuf::Struct::default_instance().fields();
  for (int t = 0; t < spec_.tensors_size(); ++t) {
    const v1::TensorSpec& tensor = spec_.tensors(t);
    const std::string wanted = NameOfShard("model", model_files_[static_cast<size_t>(t)], model_files_.back());
    const auto found = map.find(tensor.name());
    if (found != map.end() && found->second.string_value() == wanted) continue;
    return WrongIn(path, absl::StrCat("it does not say that '", tensor.name(), "' is in ", wanted));
  }
  if (static_cast<int>(map.size()) == spec_.tensors_size()) return absl::OkStatus();
  return WrongIn(path, absl::StrCat("it names tensors that ", kSpecName, " does not have"));
}

absl::Status MeaningCheck::CheckClientStates(const v1::CheckpointedRun& run) {
  const std::string path = PathOf(kClientStateName);
  SafetensorsHeader header;
  for (int rank = 0; rank < run.client_state_bytes_size(); ++rank) {
    const uint64_t bytes = run.client_state_bytes(rank);
    if (bytes > 0) header.Add(absl::StrCat("rank/", rank), "U8", {bytes}, bytes);
  }
  const uint64_t data = header.data_bytes();
  const v1::CheckpointFile* const file = FindFile(manifest_, kClientStateName);
  if ((file != nullptr) != (data > 0)) {
    return WrongIn(path, absl::StrCat(kRunName, " says that ranks have ", data, " bytes there"));
  }
  if (file == nullptr) return absl::OkStatus();
  const std::string wanted = std::move(header).Finish();
  if (file->bytes() == wanted.size() + data && Text(path, wanted.size()) == wanted) return absl::OkStatus();
  return WrongIn(path, absl::StrCat("its size or its header is not the one that ", kRunName, " leads to"));
}

absl::Status MeaningCheck::CheckRun() {
  const std::string path = PathOf(kRunName);
  v1::CheckpointedRun run;
  if (absl::Status s = FromJson(ReadFile(kRunName), path, &run); !s.ok()) return s;
  if (run.step() != manifest_.step() || run.result().step() != run.step() || run.step() == 0) {
    return WrongIn(path, absl::StrCat("it is of step ", run.step(), ", its result of step ", run.result().step(),
                                      ", and the manifest of step ", manifest_.step()));
  }
  const int ranks = static_cast<int>(std::max<uint32_t>(spec_.ranks(), 1));
  const struct {
    const char* field;
    int is, wanted;
    bool may_be_empty;
  } counts[] = {{"updates", run.updates_size(), spec_.tensors_size(), false},
                {"updatedIn", run.updated_in_size(), spec_.tensors_size(), false},
                {"averaged", run.averaged_size(), spec_.averages_size() == 0 ? 0 : spec_.tensors_size(), false},
                {"lastLr", run.last_lr_size(), spec_.tensors_size(), true},
                {"norms", run.norms_size(), spec_.has_tensor_clip() ? spec_.tensors_size() : 0, false},
                {"clientStateSteps", run.client_state_steps_size(), ranks, false},
                {"clientStateBytes", run.client_state_bytes_size(), ranks, false}};
  for (const auto& count : counts) {
    if (count.is == count.wanted || (count.may_be_empty && count.is == 0)) continue;
    return WrongIn(path, absl::StrCat(count.field, " has ", count.is, " entries, and the run has ", count.wanted));
  }
  const auto later = [&run](uint64_t step) { return step > run.step(); };
  if (std::any_of(run.updated_in().begin(), run.updated_in().end(), later) ||
      std::any_of(run.client_state_steps().begin(), run.client_state_steps().end(), later)) {
    return WrongIn(path, "it names a step after its own");
  }
  return CheckClientStates(run);
}

}  // namespace

absl::Status CheckMeaning(const std::string& folder, const v1::CheckpointManifest& manifest) {
  return MeaningCheck(folder, manifest).Check();
}

}  // namespace ballast
