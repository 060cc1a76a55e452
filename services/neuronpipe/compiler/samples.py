"""Sample text: for the comparison of an artefact with the original, and for int8 calibration.

Each of the two has English text of the Python manual, and other languages. They share no text: the comparison takes the
manual's first half and every second of SENTENCES, calibration takes the others, or the texts of a file, or the
images of a folder.
"""

import dataclasses
import itertools
import pydoc_data.topics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from neuronpipe.bundles.manifest import Calibration, file_sha256
from neuronpipe.compiler.images import encode_image_files
from neuronpipe.compiler.modules import Batch, SourceModule
from neuronpipe.compiler.tasks import SOURCE_TASKS
from neuronpipe.core.errors import SetupError
from neuronpipe.core.lines import read_lines

# Sample sentences in languages other than English: the same six, in each of sixteen languages and eleven scripts.
#
# Written for this project. They are about ordinary things and of very different lengths.

SENTENCES: Mapping[str, tuple[str, ...]] = {
    "German": (
        "Das Paket kam zu spät an, und der Karton war beschädigt.",
        "Wo kann ich das Passwort meines Kontos ändern?",
        "Vielen Dank!",
        "Die Besprechung wurde auf Donnerstag um 9:30 Uhr verschoben.",
        "Im letzten Winter fror der Fluss zum ersten Mal seit vierzig Jahren zu, und die Kinder des Dorfes gingen über "
        "ihn zur Schule, bis "
        "das Eis zu dünn wurde.",
        "Das Museum, das 1902 gebaut wurde, besitzt eine Sammlung alter Karten, Werkzeuge und Briefe, die Besucher in "
        "einem ruhigen Raum "
        "im zweiten Stock lesen dürfen.",
    ),
    "French": (
        "Le colis est arrivé en retard et le carton était abîmé.",
        "Où puis-je changer le mot de passe de mon compte ?",
        "Merci beaucoup !",
        "La réunion a été déplacée à jeudi à 9 h 30.",
        "L'hiver dernier, la rivière a gelé pour la première fois depuis quarante ans, et les enfants du village l'ont "
        "traversée à pied "
        "pour aller à l'école jusqu'à ce que la glace devienne trop mince.",
        "Le musée, construit en 1902, possède une collection de vieilles cartes, d'outils et de lettres que les "
        "visiteurs peuvent lire "
        "dans une salle calme au deuxième étage.",
    ),
    "Spanish": (
        "El paquete llegó tarde y la caja estaba dañada.",
        "¿Dónde puedo cambiar la contraseña de mi cuenta?",
        "¡Muchas gracias!",
        "La reunión se ha aplazado al jueves a las 9:30.",
        "El invierno pasado el río se heló por primera vez en cuarenta años, y los niños del pueblo lo cruzaron a pie "
        "para ir a la escuela "
        "hasta que el hielo se volvió demasiado fino.",
        "El museo, construido en 1902, tiene una colección de mapas antiguos, herramientas y cartas que los visitantes "
        "pueden leer en una "
        "sala tranquila del segundo piso.",
    ),
    "Polish": (
        "Paczka przyszła za późno, a karton był uszkodzony.",
        "Gdzie mogę zmienić hasło do mojego konta?",
        "Dziękuję bardzo!",
        "Spotkanie przełożono na czwartek na 9:30.",
        "Zeszłej zimy rzeka zamarzła po raz pierwszy od czterdziestu lat, a dzieci ze wsi chodziły po niej do szkoły, "
        "dopóki lód nie stał "
        "się zbyt cienki.",
        "Muzeum, zbudowane w 1902 roku, ma zbiór starych map, narzędzi i listów, które zwiedzający mogą czytać w "
        "cichej sali na drugim "
        "piętrze.",
    ),
    "Turkish": (
        "Paket geç geldi ve kutu hasarlıydı.",
        "Hesabımın şifresini nereden değiştirebilirim?",
        "Çok teşekkür ederim!",
        "Toplantı perşembe günü saat 9.30'a alındı.",
        "Geçen kış nehir kırk yıldan beri ilk kez dondu ve köyün çocukları buz çok incelene kadar okula onun üzerinden "
        "yürüyerek gittiler.",
        "1902 yılında yapılan müzede, ziyaretçilerin ikinci kattaki sessiz bir odada okuyabileceği eski haritalar, "
        "aletler ve mektuplar "
        "bulunuyor.",
    ),
    "Vietnamese": (
        "Gói hàng đến muộn và chiếc hộp đã bị hỏng.",
        "Tôi có thể đổi mật khẩu tài khoản của mình ở đâu?",
        "Cảm ơn rất nhiều!",
        "Cuộc họp đã được dời sang thứ Năm lúc 9 giờ 30.",
        "Mùa đông năm ngoái, dòng sông đóng băng lần đầu tiên sau bốn mươi năm, và trẻ em trong làng đi bộ qua sông "
        "đến trường cho đến khi "
        "băng trở nên quá mỏng.",
        "Bảo tàng được xây dựng năm 1902 có một bộ sưu tập bản đồ cũ, dụng cụ và thư từ mà khách tham quan có thể đọc "
        "trong một căn phòng "
        "yên tĩnh trên tầng hai.",
    ),
    "Swahili": (
        "Kifurushi kilichelewa kufika na sanduku lilikuwa limeharibika.",
        "Ninaweza kubadilisha wapi nenosiri la akaunti yangu?",
        "Asante sana!",
        "Mkutano umehamishiwa siku ya Alhamisi saa 9:30.",
        "Majira ya baridi yaliyopita mto uliganda kwa mara ya kwanza baada ya miaka arobaini, na watoto wa kijiji "
        "walitembea juu yake "
        "kwenda shuleni hadi barafu ilipokuwa nyembamba sana.",
        "Jumba la makumbusho, lililojengwa mwaka 1902, lina mkusanyiko wa ramani za zamani, zana na barua ambazo "
        "wageni wanaweza kusoma "
        "katika chumba tulivu cha ghorofa ya pili.",
    ),
    "Russian": (
        "Посылка пришла с опозданием, и коробка была повреждена.",
        "Где я могу изменить пароль от своей учётной записи?",
        "Большое спасибо!",
        "Встречу перенесли на четверг, на 9:30.",
        "Прошлой зимой река замёрзла впервые за сорок лет, и дети из деревни ходили по ней в школу, пока лёд не стал "
        "слишком тонким.",
        "В музее, построенном в 1902 году, есть собрание старых карт, инструментов и писем, которые посетители могут "
        "читать в тихой "
        "комнате на втором этаже.",
    ),
    "Greek": (
        "Το δέμα έφτασε αργά και το κουτί ήταν κατεστραμμένο.",
        "Πού μπορώ να αλλάξω τον κωδικό του λογαριασμού μου;",
        "Ευχαριστώ πολύ!",
        "Η συνάντηση μεταφέρθηκε για την Πέμπτη στις 9:30.",
        "Τον περασμένο χειμώνα το ποτάμι πάγωσε για πρώτη φορά μετά από σαράντα χρόνια, και τα παιδιά του χωριού το "
        "περνούσαν με τα πόδια "
        "για να πάνε στο σχολείο, ώσπου ο πάγος έγινε πολύ λεπτός.",
        "Το μουσείο, που χτίστηκε το 1902, έχει μια συλλογή από παλιούς χάρτες, εργαλεία και επιστολές που οι "
        "επισκέπτες μπορούν να "
        "διαβάσουν σε μια ήσυχη αίθουσα στον δεύτερο όροφο.",
    ),
    "Arabic": (
        "وصل الطرد متأخرا وكان الصندوق تالفا.",
        "أين يمكنني تغيير كلمة مرور حسابي؟",
        "شكرا جزيلا!",
        "تم تأجيل الاجتماع إلى يوم الخميس الساعة 9:30.",
        "في الشتاء الماضي تجمد النهر لأول مرة منذ أربعين عاما، وكان أطفال القرية يعبرونه سيرا على الأقدام إلى المدرسة "
        "حتى أصبح الجليد "
        "رقيقا جدا.",
        "يضم المتحف الذي بني عام 1902 مجموعة من الخرائط القديمة والأدوات والرسائل التي يمكن للزوار قراءتها في غرفة "
        "هادئة في الطابق الثاني.",
    ),
    "Hebrew": (
        "החבילה הגיעה באיחור והקופסה הייתה פגומה.",
        "איפה אפשר לשנות את הסיסמה של החשבון שלי?",
        "תודה רבה!",
        "הפגישה נדחתה ליום חמישי בשעה 9:30.",
        "בחורף שעבר קפא הנהר בפעם הראשונה מזה ארבעים שנה, וילדי הכפר חצו אותו ברגל בדרך לבית הספר עד שהקרח "
        "נעשה דק מדי.",
        "במוזיאון, שנבנה בשנת 1902, יש אוסף של מפות ישנות, כלי עבודה ומכתבים שהמבקרים יכולים לקרוא בחדר שקט "
        "בקומה השנייה.",
    ),
    "Hindi": (
        "पार्सल देर से पहुँचा और डिब्बा टूटा हुआ था।",
        "मैं अपने खाते का पासवर्ड कहाँ बदल सकता हूँ?",
        "बहुत धन्यवाद!",
        "बैठक गुरुवार को सुबह 9:30 बजे के लिए टाल दी गई है।",
        "पिछली सर्दियों में नदी चालीस साल में पहली बार जम गई, और गाँव के बच्चे उस पर चलकर स्कूल जाते रहे जब तक बर्फ़ "
        "बहुत पतली नहीं हो गई।",
        "1902 में बने संग्रहालय में पुराने नक्शों, औज़ारों और पत्रों का संग्रह है, जिन्हें आगंतुक दूसरी मंज़िल के एक शांत कमरे में पढ़ सकते हैं।",
    ),
    "Thai": (
        "พัสดุมาถึงช้าและกล่องได้รับความเสียหาย",
        "ฉันจะเปลี่ยนรหัสผ่านของบัญชีได้ที่ไหน",
        "ขอบคุณมาก",
        "การประชุมถูกเลื่อนไปเป็นวันพฤหัสบดีเวลา 9:30 น.",
        "ฤดูหนาวที่แล้วแม่น้ำกลายเป็นน้ำแข็งเป็นครั้งแรกในรอบสี่สิบปี และเด็ก ๆ ในหมู่บ้านเดินข้ามไปโรงเรียนจนกระทั่งน้ำแข็งบางเกินไป",
        "พิพิธภัณฑ์ซึ่งสร้างขึ้นในปี 1902 มีคอลเลกชันแผนที่เก่า เครื่องมือ และจดหมายที่ผู้เข้าชมสามารถอ่านได้ในห้องเงียบ ๆ บนชั้นสอง",
    ),
    "Chinese": (
        "包裹到得很晚,而且箱子已经损坏了。",
        "我在哪里可以修改账户的密码?",
        "非常感谢!",
        "会议改到了星期四上午9:30。",
        "去年冬天,这条河四十年来第一次结冰,村里的孩子们一直从冰上走着去上学,直到冰变得太薄为止。",
        "这座建于1902年的博物馆收藏了许多旧地图、工具和信件,参观者可以在二楼一个安静的房间里阅读它们。",
    ),
    "Japanese": (
        "荷物の到着が遅れ、箱が壊れていました。",
        "アカウントのパスワードはどこで変更できますか?",
        "どうもありがとうございます!",
        "会議は木曜日の9時30分に変更されました。",
        "去年の冬、川が四十年ぶりに凍り、村の子どもたちは氷が薄くなりすぎるまで、その上を歩いて学校に通っていました。",
        "1902年に建てられたその博物館には古い地図や道具、手紙のコレクションがあり、来館者は二階の静かな部屋でそれらを読むことができます。",
    ),
    "Korean": (
        "소포가 늦게 도착했고 상자가 파손되어 있었습니다.",
        "제 계정의 비밀번호는 어디에서 바꿀 수 있나요?",
        "정말 감사합니다!",
        "회의가 목요일 9시 30분으로 변경되었습니다.",
        "지난겨울 강이 사십 년 만에 처음으로 얼었고, 마을 아이들은 얼음이 너무 얇아질 때까지 그 위를 걸어서 학교에 다녔습니다.",  # noqa: E501
        "1902년에 지어진 이 박물관에는 오래된 지도와 도구, 편지가 소장되어 있으며 방문객은 이층의 조용한 방에서 그것들을 읽을 수 있습니다.",  # noqa: E501
    ),
}


Sample: TypeAlias = str | Path  # a text, or the file of an image

BUILT_IN = f"built-in sample text in {len(SENTENCES) + 1} languages"
BUILT_IN_IMAGES = "built-in sample images"

# Batches of texts of about these many words; rows of one batch differ in length, so that padding is compared too. The
# many short texts are for the agreement, of which one text of 126 is 0.8 %. With them comparing all-MiniLM-L6-v2 takes
# some 4 s (measured, 2 busy cores).
_SHORT = ((3, 18, 6, 9, 14, 25, 5, 11, 4, 20, 8, 16, 2, 12, 7, 30),) * 4
_BATCHES = ((9, 14), (2,), (25, 3, 60, 11, 30, 7, 18), (120, 90, 15), *_SHORT, (100_000,))
_ROWS = 16
# Attention to all tokens of a text grows with their square: of 32,768 tokens it has 4 GB in a layer.
_MOST_TOKENS = 4096

# For image models, which take longer. Each image is made from its words. 32 images take ViT-base 30 s (2 CPUs).
_IMAGE_BATCHES = ((4,) * 5, (4,), *((4,) * 8,) * 3, (4, 4))

# 60 texts of 2 to 120 words, mostly a sentence or two, beside 64 in other languages. Of more English texts the ranges
# fit others less well (docs/decisions/0020).
_CALIBRATION = (8, 20, 4, 12, 30, 6, 16, 50, 2, 25, 10, 40, 14, 5, 120) * 4


def comparison_batches(module: SourceModule, samples: Sequence[Sample] = ()) -> Sequence[Batch]:
    """Batches of one to sixteen texts or images: `samples`, or else sample text, or images made from it.

    The last sample text is as long as the model allows, or has 4,096 tokens where that is less.
    """
    if samples:
        return [_encode(module, samples[row : row + _ROWS]) for row in range(0, len(samples), _ROWS)]
    encode = SOURCE_TASKS[module.task].encode
    words = iter(_manual()[0])
    batches = _IMAGE_BATCHES if module.takes_images else _BATCHES
    # Not more words than the model has token positions, because each word is at least one token.
    longest = min(module.max_tokens, _MOST_TOKENS)
    limited = dataclasses.replace(module, max_tokens=longest)
    english = [encode(limited, _cut(words, (min(length, longest) for length in lengths))) for lengths in batches]
    if module.takes_images:
        return english
    others = [sentence for sentences in SENTENCES.values() for sentence in sentences[1::2]]
    return [
        *english[:-1],
        *(encode(module, others[row : row + _ROWS]) for row in range(0, len(others), _ROWS)),
        english[-1],
    ]


def sample_prompts(module: SourceModule, lengths: Sequence[int]) -> list[list[int]]:
    """Tokens of texts of about these many words, without padding, each of one token at least."""
    tokenizer = module.tokenizer.transformers_tokenizer
    found = [tokenizer(text)["input_ids"] for text in _cut(iter(_manual()[0]), lengths)]
    return [[int(token_id) for token_id in ids] for ids in found if ids]


def calibration_batches(module: SourceModule, samples: Iterable[Sample]) -> Sequence[Batch]:
    """Each text or image as an input of the model's task, in a batch of its own.

    In a shared batch, padding would count among the values of its layers.
    """
    return [_encode(module, [sample]) for sample in samples]


def _encode(module: SourceModule, samples: Sequence[Sample]) -> Batch:
    if files := [sample for sample in samples if isinstance(sample, Path)]:
        return encode_image_files(module, files)
    return SOURCE_TASKS[module.task].encode(module, [str(sample) for sample in samples])


def calibration_texts() -> Sequence[str]:
    """Texts of many lengths, none of which is in the comparison."""
    others = [sentences[::2] for sentences in SENTENCES.values()]
    long = [" ".join(sentences) for sentences in others]
    return [*_cut(iter(_manual()[1]), _CALIBRATION), *itertools.chain(*others), *long]


def _manual() -> tuple[list[str], list[str]]:
    words = " ".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)).split()
    return words[: len(words) // 2], words[len(words) // 2 :]


def _cut(words: Iterable[str], lengths: Iterable[int]) -> list[str]:
    return [" ".join(itertools.islice(words, length)) for length in lengths]


# Half of them calibrate. With 32 texts of the Python manual the embeddings of all-MiniLM-L6-v2 have a mean cosine
# similarity of 0.994 to those of float32, with 300 of 0.995 (measured over 128 others; docs/decisions/0008). With
# fewer, one odd text counts for too much.
MIN_TEXTS = 64
# More texts only take longer. Sources: NNCF's default of subset_size; about as many samples as there are without a
# file.
MAX_TEXTS, MAX_COMPARED = 300, 128
_MAX_BYTES = 64 * 1024 * 1024
_IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png", ".webp")


@dataclass(frozen=True, slots=True)
class CalibrationTexts:
    """The texts, or the files of the images, and for the manifest their source.

    `compared` are others of the same source; of built-in samples there are none.
    """

    texts: Sequence[Sample]
    description: Calibration
    compared: Sequence[Sample] = ()


def read_calibration(path: Path) -> CalibrationTexts:
    """The texts of a file, UTF-8 with one text on each line, or the images of a folder and of those in it.

    Empty lines and repeated texts do not count. Every second text is kept for the comparison. Of more than MAX_TEXTS
    and MAX_COMPARED texts, that many are taken at even distances, so that all parts of a sorted file are used. Images
    are taken likewise, by their names. Raises SetupError, which names the line or the limit.
    """
    found: list[Sample]
    if path.is_dir():
        found = [file for file in sorted(path.rglob("*")) if file.suffix.lower() in _IMAGE_SUFFIXES]
        what, digest = f"images ({', '.join(_IMAGE_SUFFIXES)})", None
    else:
        lines = read_lines(path, "--calibration", max_bytes=_MAX_BYTES)
        found = list(dict.fromkeys(line.strip() for _, line in lines))
        what, digest = "different texts, one a line", file_sha256(path)
    if len(found) < MIN_TEXTS:
        raise SetupError(f"--calibration {path}: {len(found)} {what}; calibration takes at least {MIN_TEXTS}")
    texts, compared = _spread(found[::2], MAX_TEXTS), _spread(found[1::2], MAX_COMPARED)
    return CalibrationTexts(texts, Calibration(texts=len(texts), source=str(path), source_sha256=digest), compared)


def built_in_calibration(*, of_images: bool) -> CalibrationTexts:
    """Sample text, from which images are made for a model of images."""
    texts = calibration_texts()
    return CalibrationTexts(texts, Calibration(texts=len(texts), source=BUILT_IN_IMAGES if of_images else BUILT_IN))


def _spread(samples: Sequence[Sample], most: int) -> Sequence[Sample]:
    return samples if len(samples) <= most else [samples[number * len(samples) // most] for number in range(most)]
