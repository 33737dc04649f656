// What lies in a checkpoint's folder may be damaged or of another's making: any text is read as a manifest with its sums, or
// as spec.json and run.json, as it stands, with the hashes that it would need made right, or as the message that it would
// be, so that what is behind the first checks is reached. What is accepted leads nowhere out of the folder, is in bounds, and is written as it was read. What is refused
// says why.
//
// An input is the number of what it is read as, a line, and the rest. corpus/checkpoint_fuzz is of
// tests/checkpoints/format-1. A libFuzzer target (LLVMFuzzerTestOneInput); random_inputs.cc drives it where there is no
// clang.
#include <google/protobuf/stubs/logging.h>

#include <algorithm>
#include <cstdlib>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/checkpoint/manifest.h"
#include "proto/tls/sha256.h"

#include "server/convert/canonical_spec.h"
#include "server/convert/checkpoint_json.h"
#include "server/convert/convert.h"
#include "server/convert/create_request.h"
#include "server/storage/checkpoint_reader.h"
#include "server/store/checkpoint_layout.h"
#include "tests/fuzz/input.h"
#include "tests/fuzz/require.h"
#include "tests/server/storage/model_fs.h"

namespace ballast::fuzz {
namespace {

// --- the manifest ---------------------------------------------------------------------------------------------------

void Put(ModelFs* fs, absl::string_view name, const std::string& content) {
  const auto file = fs->Create(absl::StrCat("/c/", name));
  const auto* const bytes = reinterpret_cast<const std::byte*>(content.data());
  Require(file.ok() && (*file)->Write(0, {bytes, content.size()}).ok(), "a file of it cannot be made");
}

// Files of the sizes that the manifest says, of zeros.
void ReadFiles(const v1::CheckpointManifest& manifest, const std::string& text) {
  constexpr uint64_t kLargest = 1 << 16;
  ModelFs fs;
  if (!fs.MakeFolder("/c").ok()) std::abort();
  Put(&fs, kManifestName, text);
  Put(&fs, kSumsName, SumsText(text, manifest));
  for (const v1::CheckpointFile& file : manifest.files()) {
    if (file.bytes() <= kLargest) Put(&fs, file.name(), std::string(file.bytes(), '\0'));
  }
  const auto checkpoint = CheckpointReader::Open(&fs, "/c");
  if (!checkpoint.ok()) return RequireSaid(checkpoint.status());
  const DiskBuffer buffer;
  for (const v1::CheckpointFile& file : manifest.files()) {
    std::string content(file.bytes(), '\0');
    const absl::Span<std::byte> piece(reinterpret_cast<std::byte*>(content.data()), content.size());
    const auto reader = checkpoint->OpenFile(file.name(), {piece});
    if (!reader.ok()) RequireSaid(reader.status());
    for (size_t block = 0; reader.ok() && block < reader->blocks(); ++block) {
      if (auto read = reader->Read(block, buffer); !read.ok()) RequireSaid(read);
    }
    if (auto read = checkpoint->ReadText(file.name()); !read.ok()) RequireSaid(read.status());
  }
}

void ReadAsManifest(const std::string& text, const std::string& sums) {
  const auto manifest = ReadManifest(text, sums, "/c");
  if (!manifest.ok()) return RequireSaid(manifest.status());
  std::string before;
  for (const v1::CheckpointFile& file : manifest->files()) {
    Require(file.name() > before, "its files are not in order");
    Require(!absl::StrContains(file.name(), '/') && file.name()[0] != '.', "a name leads out of the folder");
    Require(file.name() != kManifestName && file.name() != kSumsName, "it has a hash of itself");
    before = file.name();
  }
  Require(FindFile(*manifest, kSpecName) != nullptr && FindFile(*manifest, kRunName) != nullptr, "it is not whole");
  const std::string again = ToJson(*manifest);
  const auto same = ReadManifest(again, SumsText(again, *manifest), "/c");
  Require(same.ok() && ToJson(*same) == again, "it is not read as it is written");
  ReadFiles(*manifest, text);
}

void ReadWithItsSums(const std::string& text) {
  v1::CheckpointManifest manifest;
  if (auto read = FromJson(text, "m", &manifest); !read.ok()) return RequireSaid(read);
  ReadAsManifest(text, SumsText(text, manifest));
}

// --- spec.json and run.json -----------------------------------------------------------------------------------------

void ReadAsRun(const RunSpec& spec, const std::string& json) {
  const CheckpointCodec& codec = JsonCheckpoints();
  const auto run = codec.read_run(spec, json, "r");
  if (!run.ok()) return RequireSaid(run.status());
  Require(run->counts.size() == spec.tensors.size(), "a tensor has no counts");
  Require(run->memory.client_states.size() == spec.ranks, "a rank has no state");
  Require(run->memory.result.step > 0, "no step was made");
  const std::string written = codec.run_json(spec, run->figures, run->memory, run->counts);
  const auto again = codec.read_run(spec, written, "r");
  Require(again.ok(), "it cannot be read again");
  Require(codec.run_json(spec, again->figures, again->memory, again->counts) == written, "it does not stay the same");
}

void ReadAsSpecAndRun(const std::string& spec_json, const std::string& run_json) {
  v1::RunSpec spec;
  if (auto read = FromJson(spec_json, "s", &spec); !read.ok()) return RequireSaid(read);
  const auto request = ToCreateRequest(spec_json, Sha256Hex(SerializeCanonical(spec)), "s", Config::Limits());
  if (!request.ok()) return RequireSaid(request.status());
  const std::vector<CheckpointShard> shards = LayOutCheckpoint(request->spec);
  size_t planes = 0;
  for (const CheckpointShard& shard : shards) {
    Require(shard.header.size() % 4096 == 0, "the data of a file is not aligned");
    planes += shard.planes.size();
  }
  Require(planes >= request->spec.tensors.size(), "a tensor is in no file");
  Require(!CheckpointIndex(request->spec, shards).empty(), "there is no index");
  constexpr uint32_t kMostRanks = 64;  // each has a state in memory
  if (request->spec.ranks <= kMostRanks) ReadAsRun(request->spec, run_json);
}

// --- messages, of which more than of a text is left right when a byte of them is changed ----------------------------

// The spec of corpus/checkpoint_fuzz/run_message.
RunSpec SmallSpec() {
  v1::RunSpec spec;
  spec.set_run_id("golden");
  for (int i = 0; i < 6; ++i) {
    v1::TensorSpec* const tensor = spec.add_tensors();
    tensor->set_name(absl::StrCat("param.", i));
    tensor->add_shape(33);
    tensor->set_dtype("fp32");
  }
  spec.add_groups()->set_rule("adamw");
  return ToRunSpec(spec, Config::Limits()).value();
}

void ReadAsRunMessage(const std::string& bytes) {
  static const RunSpec* const spec = new RunSpec(SmallSpec());
  v1::CheckpointedRun run;
  if (run.ParseFromString(bytes)) ReadAsRun(*spec, ToJson(run));
}

void ReadAsManifestMessage(const std::string& bytes) {
  v1::CheckpointManifest manifest;
  if (manifest.ParseFromString(bytes)) ReadWithItsSums(ToJson(manifest));
}

void RunOne(Input in) {
  const uint32_t what = in.Below(5);
  const std::string text = in.Rest();
  const size_t end = std::min(text.find('\n'), text.size());
  const std::string line = text.substr(0, end), rest = text.substr(std::min(end + 1, text.size()));
  switch (what) {
    case 0:
      return ReadAsManifest(line, rest);
    case 1:
      return ReadWithItsSums(line);
    case 2:
      return ReadAsSpecAndRun(line, rest);
    case 3:
      return ReadAsRunMessage(text);
    default:
      return ReadAsManifestMessage(text);
  }
}

}  // namespace
}  // namespace ballast::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // It says of every text that is no UTF-8 so.
  static auto* const said = google::protobuf::SetLogHandler(nullptr);
  static_cast<void>(said);
  ballast::fuzz::RunOne({data, size});
  return 0;
}
