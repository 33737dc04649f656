#include "proto/checkpoint/file_digest.h"

#include <openssl/evp.h>

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/escaping.h"
#include "proto/checksum.h"

namespace ballast {

struct FileDigest::Sha256 {
  EVP_MD_CTX* const context = EVP_MD_CTX_new();
  ~Sha256() { EVP_MD_CTX_free(context); }
};

FileDigest::FileDigest() : sha256_(std::make_unique<Sha256>()) {
  EVP_DigestInit_ex(sha256_->context, EVP_sha256(), nullptr);
}
FileDigest::~FileDigest() = default;

void FileDigest::Add(absl::Span<const std::byte> bytes) {
  EVP_DigestUpdate(sha256_->context, bytes.data(), bytes.size());
  file_.set_bytes(file_.bytes() + bytes.size());
  while (!bytes.empty()) {
    const auto piece =
        bytes.subspan(0, static_cast<size_t>(std::min<uint64_t>(bytes.size(), kChecksumBlock - in_block_)));
    crc_ = ExtendCrc32c(crc_, piece);
    in_block_ += piece.size();
    bytes.remove_prefix(piece.size());
    if (in_block_ < kChecksumBlock) continue;
    file_.add_crc32c(std::exchange(crc_, 0));
    in_block_ = 0;
  }
}

v1::CheckpointFile FileDigest::Finish(std::string name) {
  if (in_block_ > 0) file_.add_crc32c(crc_);
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned int size = 0;
  EVP_DigestFinal_ex(sha256_->context, digest.data(), &size);
  file_.set_sha256(absl::BytesToHexString({reinterpret_cast<const char*>(digest.data()), size}));
  file_.set_name(std::move(name));
  return std::move(file_);
}

v1::CheckpointFile DigestOf(std::string name, absl::string_view bytes) {
  FileDigest digest;
  digest.Add(absl::MakeConstSpan(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()));
  return digest.Finish(std::move(name));
}

}  // namespace ballast
