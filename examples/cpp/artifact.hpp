// Self-test of an exported folder in C++17: checksums and golden frames, like `python -m segpipe.runtime selftest`.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace segpipe {

constexpr int kUsage = 2, kOtherAnswers = 4, kAltered = 7;  // exit codes, the same as the Python runtime's
constexpr char kFormat[] = "\n \"format\": \"segpipe-export/3\"", kProfile[] = "\n \"profile\": \"robot\"";

struct Failure { int exit_code; std::string what; };

inline void require(bool fits, int code, const std::string& otherwise) {
  if (!fits) throw Failure{code, otherwise};
}

// libtorch appends a stack trace to its messages.
inline std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

// Hex digest. Source: FIPS 180-4, section 6.2.
inline std::string sha256(std::string text) {
  static const std::array<uint32_t, 64> k = {
      0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
      0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
      0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
      0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
      0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
      0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
      0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
      0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
  std::array<uint32_t, 8> h = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                               0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  const auto turn = [](uint32_t x, int n) { return (x >> n) | (x << (32 - n)); };
  const uint64_t bits = 8 * uint64_t{text.size()};
  text += '\x80';
  text.append((120 - text.size() % 64) % 64, '\0');
  for (int shift = 56; shift >= 0; shift -= 8) text += static_cast<char>(bits >> shift);
  for (size_t start = 0; start < text.size(); start += 64) {
    std::array<uint32_t, 64> w{};
    for (size_t i = 0; i < 64; ++i) w[i / 4] = (w[i / 4] << 8) | static_cast<uint8_t>(text[start + i]);
    for (size_t i = 16; i < 64; ++i) {
      const uint32_t a = w[i - 15], b = w[i - 2];
      w[i] = w[i - 16] + (turn(a, 7) ^ turn(a, 18) ^ (a >> 3)) + w[i - 7] + (turn(b, 17) ^ turn(b, 19) ^ (b >> 10));
    }
    auto v = h;  // the working variables a to h
    for (size_t i = 0; i < 64; ++i) {
      const uint32_t e = v[4], a = v[0];
      const uint32_t first = v[7] + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + ((e & v[5]) ^ (~e & v[6])) + k[i] + w[i];
      const uint32_t second = (turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + ((a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]));
      v = {first + second, v[0], v[1], v[2], v[3] + first, v[4], v[5], v[6]};
    }
    for (size_t i = 0; i < 8; ++i) h[i] += v[i];
  }
  std::string digest;
  for (const uint32_t word : h)
    for (int shift = 28; shift >= 0; shift -= 4) digest += "0123456789abcdef"[(word >> shift) & 15];
  return digest;
}

// An exported folder. The constructor compares every file in SHA256SUMS with its checksum.
class Folder {
  std::filesystem::path path_;
  std::map<std::string, std::string> sums_;

 public:
  explicit Folder(std::filesystem::path path) : path_(std::move(path)) {
    std::ifstream file(path_ / "SHA256SUMS");
    require(bool(file), kAltered, path_.string() + "/SHA256SUMS cannot be read; expected an exported folder.");
    for (std::string line; std::getline(file, line);) {
      const std::string name = line.size() > 66 && line.substr(64, 2) == "  " ? line.substr(66) : "..";
      require(name[0] != '/' && name.find("..") == std::string::npos, kAltered, "SHA256SUMS has the line " + line);
      sums_[name] = line.substr(0, 64);
    }
    for (const auto& [name, digest] : sums_) read(name);
  }

  // Content of a listed file, after comparing these bytes with their checksum.
  std::string read(const std::string& name) const {
    require(sums_.count(name) == 1, kAltered, "SHA256SUMS does not list " + name + ". Export again.");
    std::ifstream file(path_ / name, std::ios::binary);
    std::string content{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    const bool whole = file && sha256(content) == sums_.at(name);
    require(whole, kAltered, (path_ / name).string() + " is missing, altered or truncated. Copy the whole folder again.");
    return content;
  }
};

// Value of `key` in a section of the manifest, as text. Exports indent the manifest by one space per level.
inline std::string entry(const std::string& manifest, const std::string& section, const std::string& key) {
  const size_t from = manifest.find("\n \"" + section + "\": {");
  const size_t start = from == std::string::npos ? from : manifest.find("\n  \"" + key + "\": ", from);
  const bool there = start < manifest.find("\n }", from);
  require(there, kAltered, "the manifest has no " + section + "." + key + ". Export again.");
  return manifest.substr(start + key.size() + 7, manifest.find_first_of(",\n", start + 1) - start - key.size() - 7);
}

struct Frames {  // uint8, contiguous
  std::vector<int64_t> shape;
  std::string bytes;
  size_t size() const { return bytes.size() / static_cast<size_t>(shape[0]); }  // bytes per frame
  const uint8_t* at(size_t index) const { return reinterpret_cast<const uint8_t*>(bytes.data()) + index * size(); }
};

// golden/NAME.npy. Source: numpy.lib.format, versions 1 and 2.
inline Frames golden(const Folder& folder, const std::string& name) {
  const std::string file = folder.read("golden/" + name + ".npy");
  const auto byte = [&](size_t at) { return static_cast<size_t>(static_cast<uint8_t>(file.at(at))); };
  const size_t start = byte(6) == 1 ? 10 : 12, head = byte(8) + (byte(9) << 8);
  const std::string text = file.substr(start, head);
  std::array<long long, 4> side{};
  const char* shape = text.c_str() + std::min(text.find('('), text.size());
  const int sides = std::sscanf(shape, "(%lld, %lld, %lld, %lld", &side[0], &side[1], &side[2], &side[3]);
  Frames frames{{side.begin(), side.begin() + std::max(sides, 0)}, file.substr(start + head)};
  size_t size = 1;
  for (const int64_t length : frames.shape) size *= static_cast<size_t>(length);
  require(sides > 2 && size > 0 && size == frames.bytes.size() && text.find("'|u1'") != std::string::npos &&
              text.find("'fortran_order': False") != std::string::npos,
          kAltered, name + ".npy holds " + first_line(text) + ", but uint8 frames were needed. Export again.");
  return frames;
}

using Golden = std::array<Frames, 3>;  // image, mask, confidence
struct Answer { std::string mask, confidence; };
using Run = std::function<Answer(const uint8_t* image)>;
struct Model { std::string manifest; Run run; };  // the manifest inside the model file

// Whether the answer to one golden frame is close enough. Prints the difference and the median time of `runs` runs.
inline bool compare(const Run& run, size_t index, int runs, const Golden& frames, double share, int step) {
  std::vector<double> times;
  Answer answer;
  for (int turn = -3; turn < runs; ++turn) {  // the first runs plan memory and are not timed
    const auto begin = std::chrono::steady_clock::now();
    try {
      answer = run(frames[0].at(index));
    } catch (const std::exception& error) {
      throw Failure{kOtherAnswers, std::string("The model fails on this machine: ") + first_line(error.what())};
    }
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - begin;
    if (turn >= 0) times.push_back(time.count());
  }
  const bool sizes = answer.mask.size() == frames[1].size() && answer.confidence.size() == frames[2].size();
  require(sizes, kOtherAnswers, "The answers differ in size from golden/.");
  size_t equal = 0;
  int widest = 0;
  for (size_t i = 0; i < frames[1].size(); ++i) equal += uint8_t(answer.mask[i]) == frames[1].at(index)[i];
  for (size_t i = 0; i < frames[2].size(); ++i)
    widest = std::max(widest, std::abs(uint8_t(answer.confidence[i]) - frames[2].at(index)[i]));
  const double found = static_cast<double>(equal) / static_cast<double>(frames[1].size());
  std::nth_element(times.begin(), times.begin() + runs / 2, times.end());
  std::printf("frame %zu: %.4f %% of the pixels equal, confidence within %d levels, p50 %.3f ms\n", index, 100 * found,
              widest, times[static_cast<size_t>(runs / 2)]);
  return found >= share && widest <= step;
}

// Exit code of a program that loads `file` of the folder argv[1] with `open(bytes, golden)`.
template <class Open>
int self_test(int argc, char** argv, const std::string& file, const Open& open) try {
  const int runs = argc == 3 ? std::atoi(argv[2]) : 20;
  require((argc == 2 || argc == 3) && runs > 0, kUsage, "usage: " + std::string(argv[0]) + " FOLDER [RUNS]");
  const Folder folder(argv[1]);
  const std::string manifest = folder.read("manifest.json"), weights = entry(manifest, "source", "ema_digest");
  const double share = std::stod(entry(manifest, "golden", "image_agreement"));
  const int step = std::stoi(entry(manifest, "golden", "confidence_levels"));
  // Written so that NaN fails.
  require(share >= 0.999 && share <= 1 && step >= 0 && step <= 1, kAltered, "golden limits are not those of fp32.");
  const bool known = manifest.find(kFormat) < manifest.find(kProfile) && manifest.find(kProfile) < manifest.size();
  require(known, kAltered, "the manifest has another format or profile; segpipe-export/3, robot was needed.");
  const Golden frames = {golden(folder, "image"), golden(folder, "mask"), golden(folder, "confidence")};
  const int64_t count = frames[0].shape[0];
  require(count == frames[1].shape[0] && count == frames[2].shape[0], kAltered, "golden/ has images without answers.");
  const Model model = open(folder.read(file), frames);
  const bool mixed = entry(model.manifest, "source", "ema_digest") != weights;
  require(!mixed, kAltered, file + " holds weights that the manifest does not describe. Copy the whole folder again.");
  bool same = true;
  for (size_t index = 0; index < static_cast<size_t>(count); ++index)
    same = compare(model.run, index, runs, frames, share, step) && same;
  require(same, kOtherAnswers, file + " gives different answers on this machine than where it was exported.");
  return 0;
} catch (const Failure& failure) {
  return std::fprintf(stderr, "%s\n", failure.what.c_str()), failure.exit_code;
} catch (const std::exception& error) {
  return std::fprintf(stderr, "%s cannot be used: %s\n", file.c_str(), first_line(error.what()).c_str()), kAltered;
}

}  // namespace segpipe
